"""Our kernels by Triton's interpreter on a CPU: the numbers of plain operations.

Triton comes with torch for CUDA. Beside a torch for CPUs it is installed by `pip install triton`, which makes no other
test run otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.models.fast.test_grouped import bank_of, far, learned, of_a_layer, with_dropout
from torch import Tensor

from kapelle.engines.train.torch import large_head
from kapelle.models.fast import elementwise, flat, kernels, routed_linear

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (`pip install triton`): nothing proves our kernels here",
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),
]

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}
"""Half precision is rounded once or twice; the interpreter rounds bfloat16 down."""

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def everywhere() -> Iterator[None]:
    """The kernels are the operations on a CPU too. Triton wraps them for its interpreter when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from kapelle.models.fast import layer_kernels, triton_products

        assert triton_products.INTERPRETED, "something has imported them for a GPU before"
        patch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: True)
        library = torch.library.Library("kapelle", "IMPL")
        for module, names in (
            (
                layer_kernels,
                [
                    "norm",
                    "add_norm",
                    "norm_again",
                    "norm_back",
                    "turn",
                    "turn_back",
                    "gate",
                    "gate_back",
                    "fold",
                ],
            ),
            (triton_products, ("grouped", "add_grouped", "grouped_outer")),
        ):
            for name in names:
                library.impl(name, getattr(module, name), "CPU", allow_override=True)
        yield
        library._destroy()


Trial = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def check(trial: Trial, dtype: torch.dtype) -> None:
    for number, (one, other) in enumerate(trial()):
        assert one.dtype == other.dtype, number
        assert one.shape == other.shape, number
        most = float((one.float() - other.float()).abs().max())
        assert most <= BOUND[dtype] * float(other.float().abs().max()), number


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("width", "size", "rows"), [(64, 16, 3), (40, 12, 1), (72, 10, 37)])
def test_what_lies_between_products(dtype: torch.dtype, width: int, size: int, rows: int) -> None:
    check(lambda: elementwise.trial(CPU, dtype, width, size, rows), dtype)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", BOUND)
def test_grouped_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer and three, few rows and many, sizes below and above a tile, a group without rows, sums in parts."""
    from kapelle.models.fast import triton_products

    monkeypatch.setattr(triton_products, "SUMMED", 128)
    check(lambda: routed_linear.trial(CPU, dtype, (90, 300)), dtype)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", BOUND)
def test_the_softmax_of_an_output_head(dtype: torch.dtype) -> None:
    check(lambda: large_head.trial(CPU, dtype), dtype)


@pytest.mark.usefixtures("everywhere")
def test_rows_that_lie_apart() -> None:
    """Weights either way round, rows and gradients that are parts of others, and a rank that is no tile."""
    generator = torch.Generator().manual_seed(0)
    wide_NI, given_NO = torch.randn(30, 43, generator=generator), torch.randn(9, 30, generator=generator).t()
    weight_GKM = torch.randn(2, 5, 40, generator=generator).transpose(1, 2)
    ends_G, x_NI = torch.tensor((13, 30), dtype=torch.int32), wide_NI[:, 1:41]
    made_NM = routed_linear.GROUPED([x_NI], weight_GKM, None, ends_G)
    expected_NM = torch.cat((x_NI[:13] @ weight_GKM[0], x_NI[13:] @ weight_GKM[1]))
    assert far(made_NM, expected_NM) < 1e-6
    outer_GPQ = routed_linear.GROUPED_OUTER([given_NO], made_NM, ends_G, torch.float32)
    assert far(outer_GPQ[1], given_NO[13:].t() @ made_NM[13:]) < 1e-6


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dropout", [(0.0,) * 4, (0.5, 0.0, 0.2, 0.1)])
def test_a_model_learns_as_by_plain_operations(
    dropout: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parameters = bank_of(with_dropout(dropout))
    monkeypatch.setattr(flat, "pieces_for", lambda *_: elementwise.KERNELS)
    together, layer = learned(model, parameters), of_a_layer(model, parameters)
    monkeypatch.setattr(flat, "pieces_for", lambda *_: elementwise.PLAIN)
    monkeypatch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: False)
    for name, expected in of_a_layer(model, parameters).items():
        assert far(layer[name], expected) < 1e-6, name
    for name, apart in learned(model, parameters).items():
        found = together[name]
        assert (found is None) == (apart is None), name
        if found is not None and apart is not None:
            assert far(found, apart) < 1e-4, name


def test_the_trial_finds_an_incorrect_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_found", {})
    plain = routed_linear.GROUPED_OUTER
    monkeypatch.setattr(routed_linear, "GROUPED_OUTER", lambda *given: 1.1 * plain(*given))
    assert not kernels.holds("products", (CPU,), lambda: routed_linear.trial(CPU, torch.float32, (90,)))
    assert "differ from plain operations" in caplog.text


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kapelle.models.fast import layer_kernels, triton_products

NUMBERS = {"eps": "fp32", "scale": "fp32", "ends_G": "*i32", "token_K": "*i64", "size_Q": "i32", "tiles_Q": "i32", "out_P": "i32"}
WIDE = ("x_ND", "sum_ND", "inverse_N1", "more_ND", "dx_ND", "part_PD", "part_NPE", "cos_N1E", "sin_N1E", "scale_G")
SUMS = ("temperature_K", "peak_K", "target_K", "others_K", "moment_K", "shrink_K")
FIXED = {"BLOCK": 1024, "EACH": 32, "HEADS": 8, "HALF": 64, "LAYERS": 3, "ROWS": 64, "PRECISION": "ieee", "INTERPRETED": False}

for capability in (80, 90, 120):
    for module, name in (
        *((layer_kernels, f"_{name}_kernel") for name in ("norm", "norm_back", "turn", "turn_back", "gate", "gate_back", "fold")),
        *((triton_products, f"_{name}_kernel") for name in ("grouped", "outer")),
    ):
        kernel = getattr(module, name)
        fixed = {
            arg: FIXED.get(arg, 16 if arg.startswith("TILE") else arg != "KNOWN") for arg in kernel.arg_names if arg.isupper()
        }
        types = dict.fromkeys(fixed, "constexpr")
        for arg in kernel.arg_names:
            pointer = arg.rpartition("_")[2].isupper() or arg[:-2] in ("x", "weight", "out", "left", "right")
            narrow = "*fp32" if arg in (*WIDE, *SUMS) else "*bf16"
            types.setdefault(arg, NUMBERS.get(arg, narrow if pointer else "i32"))
        source = ASTSource(kernel, types, {(kernel.arg_names.index(k),): v for k, v in fixed.items()})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        multiplies = "mma.sync" in made.asm["ptx"] or "wgmma" in made.asm["ptx"]
        print(capability, name, multiplies == (module is triton_products), len(made.asm["cubin"]) > 0)
"""


@pytest.mark.long
def test_they_compile_for_gpus(tmp_path: Path) -> None:
    """Products to those of tensor cores, in half precision: a compiler needs no GPU."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = [line.split() for line in ended.stdout.splitlines()]
    assert len(said) == 27
    assert all(line[2:] == ["True", "True"] for line in said), ended.stdout
