"""The decoding kernels by Triton's interpreter on a CPU, compared with plain operations, and compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.fast.compile_kernels import compiled

from kapelle.models.fast import decode_ops
from kapelle.models.fast.decode_ops import LayerKind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (`make test-kernels`): nothing proves our decoding kernels here",
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

NAMES = ("join_norm", "turn_heads", "attend", "gather", "join_gates", "lower")

KINDS = {
    "qwen3": LayerKind(40, 72, 4, 2, 16, True, False, False, False, False, 0, 0.0),
    "gemma2": LayerKind(600, 1030, 6, 2, 24, False, True, True, True, False, 50, 20.0),
    "qwen2": LayerKind(64, 128, 4, 4, 128, False, False, False, False, True, 0, 0.0),
}
"""Sizes that are no powers of two, smaller and larger than what a program reads at once."""

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2**-5}
"""The interpreter rounds bfloat16 down, several times in a layer."""


@pytest.fixture(scope="module")
def own() -> Iterator[ModuleType]:
    """The kernels, which Triton wraps for its interpreter when they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from kapelle.models.fast import decode_kernels

        assert decode_kernels.INTERPRETED, "something has imported them for a GPU before"
        yield decode_kernels


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kernels_compute_what_plain_operations_do(
    own: ModuleType, kind: LayerKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    for name in (f"_{name}" for name in NAMES):
        monkeypatch.setattr(own, name, _Counted(getattr(own, name), started))
    device = torch.device("cpu")
    expected = decode_ops._small_layer(device, dtype, kind)
    calls: list[str] = []

    def called(name: str) -> Any:
        def run(*given: Any, **outputs: Any) -> None:
            calls.append(name)
            getattr(own, name)(*given, **outputs)

        return run

    monkeypatch.setattr(decode_ops, "ops", lambda: SimpleNamespace(**{name: called(name) for name in NAMES}))
    found = decode_ops._small_layer(device, dtype, kind)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= BOUNDS[dtype] * other.abs().max()
    assert len(started) == len(calls)  # one kernel each, as the twin of a GPU counts them


class _Counted:
    """A kernel that notes each start."""

    def __init__(self, kernel: Any, started: list[int]) -> None:
        self._kernel, self._started = kernel, started

    def __getitem__(self, grid: Any) -> Any:
        self._started.append(1)
        return self._kernel[grid]


@pytest.mark.long
def test_kernels_compile_for_gpus() -> None:
    # Attention multiplies on tensor cores in half precision alone.
    assert compiled("decoding") == {*((f"_{name}", False) for name in NAMES), ("_attend", True)}
