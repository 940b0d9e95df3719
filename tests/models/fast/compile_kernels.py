"""Compiles the Triton kernels that some work starts, for GPUs that are not here: `python -m tests.models.fast.compile_kernels decoding`.

Triton compiles for a GPU without having one, down to the machine code of `ptxas`. The arguments are those of the work,
whose numbers are not computed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CAPABILITIES = (80, 90, 120)


def compiling(work: Callable[[], object]) -> set[tuple[str, bool]]:
    """Compile every kernel that some work starts; return their names, each with whether it multiplies on tensor cores."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made: dict[Any, bool] = {}

    def compiled(kernel: Any, *given: Any, grid: Any, warmup: bool, num_warps: int = 4, **_: Any) -> None:
        signature, constants = {}, {}
        for parameter, value in zip(kernel.params, given, strict=True):
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{KINDS[value.dtype]}"
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        key = kernel.__name__, tuple(signature.items()), tuple(constants.items())
        if key in made:
            return
        for capability in CAPABILITIES:
            found = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=constants),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": num_warps},
            )
            assert found.asm["cubin"]
            made[key] = "mma.sync" in found.asm["ptx"] or "wgmma" in found.asm["ptx"]

    triton.runtime.jit.JITFunction.run = compiled
    work()
    return {(name, multiplies) for (name, *_), multiplies in made.items()}


KINDS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def decoding() -> None:
    """Start every kernel of a decoding step, for two kinds of layers."""
    from tests.models.fast.test_decode_kernels import KINDS as LAYERS
    from tests.models.fast.test_decode_kernels import NAMES

    from kapelle.models.fast import decode_kernels, decode_ops

    own = {name: getattr(decode_kernels, name) for name in NAMES}
    decode_ops.ops = lambda: SimpleNamespace(**own)  # type: ignore[assignment]
    for kind, dtype in (("qwen3", torch.bfloat16), ("gemma2", torch.float16), ("qwen2", torch.float32)):
        decode_ops._small_layer(torch.device("cpu"), dtype, LAYERS[kind])


def updates() -> None:
    """Start every kernel of an update in half precision."""
    from tests.models.fast.test_triton_products import CPU, on_a_cpu

    from kapelle.engines.train.torch import large_head
    from kapelle.models.fast import elementwise, routed_linear

    routed_linear.has_kernel = lambda device, dtype: True
    with on_a_cpu():
        for trial in (
            elementwise.trial(CPU, torch.bfloat16, 256, 128, 64),
            routed_linear.trial(CPU, torch.bfloat16, (90, 300)),
            large_head.trial(CPU, torch.bfloat16),
        ):
            list(trial)


def compiled(what: str) -> set[tuple[str, bool]]:
    """Return `compiling` of one of the kinds of work below, in a process in which Triton does not interpret."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.fast.compile_kernels", what]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = [line.split() for line in ended.stdout.splitlines()]
    return {(name, multiplies == "True") for name, multiplies in lines}


if __name__ == "__main__":
    for name, multiplies in sorted(compiling({"decoding": decoding, "updates": updates}[sys.argv[1]])):
        sys.stdout.write(f"{name} {multiplies}\n")
