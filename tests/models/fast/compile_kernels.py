"""Compiles the Triton kernels that some work starts, for GPUs that are not here: `python -m tests.models.fast.compile_kernels`.

Triton compiles for a GPU without having one, down to the machine code of `ptxas`. The arguments are those of the work,
whose numbers are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90)


def compiling(work: Callable[[], object]) -> set[str]:
    """Compile every kernel that some work starts, and return the kernels' names."""
    made: dict[Any, None] = {}

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
        for capability in CAPABILITIES if key not in made else ():
            triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=constants),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": num_warps},
            )
        made[key] = None

    triton.runtime.jit.JITFunction.run = compiled
    work()
    return {name for name, *_ in made}


KINDS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def decoding() -> None:
    """Start every kernel of a decoding step, for two kinds of layers."""
    from kapelle.models.fast import decode_kernels, decode_ops
    from tests.models.fast.test_decode_kernels import KINDS as LAYERS
    from tests.models.fast.test_decode_kernels import NAMES

    own = {name: getattr(decode_kernels, name) for name in NAMES}
    decode_ops.ops = lambda: SimpleNamespace(**own)  # type: ignore[assignment]
    for kind, dtype in (("qwen3", torch.bfloat16), ("gemma2", torch.float16), ("qwen2", torch.float32)):
        decode_ops._small_layer(torch.device("cpu"), dtype, LAYERS[kind])


if __name__ == "__main__":
    for name in sorted(compiling(decoding)):
        print(name)
