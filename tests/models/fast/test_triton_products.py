"""Our grouped products by Triton's interpreter on a CPU: the numbers of one product after another.

Triton comes with torch for CUDA. Beside a torch for CPUs it is installed by `pip install triton`, which makes no other
test run otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.models.fast.test_grouped import KINDS, bank_of, far, learned, of_a_layer, with_dropout
from torch import Tensor

from kapelle.models.fast import kernels, routed_linear

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (`pip install triton`): nothing proves our grouped products here",
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

ENDS = [(3, 3, 70, 200), (200,), (0, 130, 200), (64, 128, 200)]
SIZES = [(40, 9), (16, 16), (130, 70), (8, 200)]
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}
"""Half precision is rounded once; the interpreter rounds bfloat16 down."""


@pytest.fixture(scope="module")
def own() -> Iterator[ModuleType]:
    """The products, which Triton wraps for its interpreter when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from kapelle.models.fast import triton_products

        assert triton_products.INTERPRETED, "something has imported them for a GPU before"
        yield triton_products


@pytest.fixture
def everywhere(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are grouped by them on a CPU too."""
    monkeypatch.setattr(routed_linear, "triton_has_kernel", lambda _device, _dtype: True)


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("ends", "sizes"), zip(ENDS, SIZES, strict=True))
def test_each_group_is_a_product(
    own: ModuleType, ends: Sequence[int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Rows that lie apart, weights either way round, groups without rows, sizes below and above a tile."""
    summed, width = sizes
    x_NK = drawn(200, summed + 3, seed=0, dtype=dtype)[:, 1 : summed + 1]
    weight_GKM = drawn(len(ends), width, summed, seed=1, dtype=dtype).transpose(1, 2)
    y_NM = drawn(200, width, seed=2, dtype=dtype)
    ends_G = torch.tensor(ends, dtype=torch.int32)
    made_NM = own.grouped(x_NK, weight_GKM, ends_G)
    same_NM = own.grouped(x_NK, weight_GKM.contiguous(), ends_G)
    outer_GKM = own.grouped_outer(x_NK, y_NM, ends_G)
    assert made_NM.dtype == outer_GKM.dtype == dtype
    assert torch.equal(made_NM, same_NM)
    for group, (first, last) in enumerate(zip((0, *ends), ends, strict=False)):
        rows = slice(first, last)
        expected_GKM = x_NK[rows].double().t() @ y_NM[rows].double()
        if first == last:
            assert not outer_GKM[group].any()
            continue
        assert far(outer_GKM[group].double(), expected_GKM) < BOUND[dtype]
        assert far(made_NM[rows].double(), x_NK[rows].double() @ weight_GKM[group].double()) < BOUND[dtype]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dropout", [(0.0,) * 4, (0.5, 0.0, 0.2, 0.1)])
def test_adapters_learn_as_one_after_another(
    dropout: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parameters = bank_of(with_dropout(dropout))
    together, layer = learned(model, parameters), of_a_layer(model, parameters)
    monkeypatch.setattr(routed_linear, "triton_has_kernel", lambda _device, _dtype: False)
    for name, expected in of_a_layer(model, parameters).items():
        assert far(layer[name], expected) < 1e-6, name
    for name, apart in learned(model, parameters).items():
        found = together[name]
        assert (found is None) == (apart is None), name
        if found is not None and apart is not None:
            assert far(found, apart) < 1e-4, name


@pytest.mark.usefixtures("everywhere")
def test_in_half_precision_they_are_about_as_near_the_truth() -> None:
    model, parameters = bank_of(KINDS)
    exact = of_a_layer(model, parameters)
    for name, found in of_a_layer(model, parameters, dtype=torch.float16).items():
        assert 0 < far(found.float(), exact[name]) < 5e-3, name


def test_the_trial_passes_and_finds_an_incorrect_kernel(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_found", {})
    cpu = torch.device("cpu")
    for dtype in BOUND:
        assert kernels.holds("products", (cpu, dtype), lambda: routed_linear._trial(cpu, dtype))  # noqa: B023
    assert not caplog.records
    plain = own.grouped_outer
    monkeypatch.setattr(own, "grouped_outer", lambda left, right, ends: 1.1 * plain(left, right, ends))
    assert not kernels.holds("other", (cpu,), lambda: routed_linear._trial(cpu, torch.float32))
    assert "differ from plain operations" in caplog.text


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kapelle.models.fast import triton_products

for capability in (80, 89, 90, 120):
    for name, one, other in (("_grouped_kernel", "TILE_K", "TILE_M"), ("_outer_kernel", "TILE_P", "TILE_Q")):
        kernel = getattr(triton_products, name)
        names = kernel.arg_names
        fixed = {"ROWS": 64, one: 64, other: 16, "PRECISION": "ieee", "INTERPRETED": False}
        types = dict.fromkeys(names, "i32") | {arg: "*bf16" for arg in names[:3]} | {"ends_G": "*i32"}
        types |= dict.fromkeys(fixed, "constexpr")
        source = ASTSource(kernel, types, {(names.index(k),): value for k, value in fixed.items()})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(capability, name, "mma.sync" in made.asm["ptx"] or "wgmma" in made.asm["ptx"], len(made.asm["cubin"]) > 0)
"""


def test_they_compile_for_gpus(tmp_path: Path) -> None:
    """To products by tensor cores, in half precision: a compiler needs no GPU."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = [line.split() for line in ended.stdout.splitlines()]
    assert len(said) == 8
    assert all(line[2:] == ["True", "True"] for line in said), ended.stdout
