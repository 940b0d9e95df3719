"""Our kernels by Triton's interpreter on a CPU: the numbers of plain operations.

Triton comes with torch for CUDA. Beside a torch for CPUs it is installed by `pip install triton`, which makes no other
test run otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from tests.models.fast.compile_kernels import compiled
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


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Within it, the kernels are the operations on a CPU too."""
    from kapelle.models.fast import layer_kernels, triton_products

    library = torch.library.Library("kapelle", "IMPL")
    layer = "norm add_norm norm_again norm_back turn turn_back gate gate_back fold"
    for module, names in ((layer_kernels, layer), (triton_products, "grouped add_grouped grouped_outer")):
        for name in names.split():
            library.impl(name, getattr(module, name), "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.fixture(scope="module")
def everywhere() -> Iterator[None]:
    """Triton wraps the kernels for its interpreter when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from kapelle.models.fast import triton_products

        assert triton_products.INTERPRETED, "something has imported them for a GPU before"
        patch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: True)
        with on_a_cpu():
            yield


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


@pytest.mark.long
def test_they_compile_for_gpus() -> None:
    """Products to those of tensor cores, in half precision: a compiler needs no GPU."""
    layer = ("norm", "norm_back", "turn", "turn_back", "gate", "gate_back", "fold")
    expected = {(f"_{name}_kernel", False) for name in layer}
    assert compiled("updates") == {*expected, ("_grouped_kernel", True), ("_outer_kernel", True)}
