"""A kernel is used where its trial gives the numbers of plain operations, and a line in the log says where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kapelle.models.fast import kernels

ONES = torch.ones(3)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_found", {})


def offering(
    *pairs: tuple[Tensor, Tensor],
) -> tuple[Callable[[], Iterator[tuple[Tensor, Tensor]]], list[int]]:
    """A trial, and a list that has an entry for each time that it ran."""
    ran: list[int] = []

    def trial() -> Iterator[tuple[Tensor, Tensor]]:
        ran.append(1)
        yield from pairs

    return trial, ran


def test_it_is_tried_once_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    trial, ran = offering((ONES, ONES + 1e-5), (ONES.half(), ONES.half() * 1.002))
    assert all(kernels.holds("Sums", ("here", dtype), trial) for dtype in (1, 1, 2))
    assert len(ran) == 2
    assert not caplog.records


@pytest.mark.parametrize("wrong", [ONES * 1.001, ONES / 0, ONES * float("nan"), -ONES])
def test_wrong_numbers_are_rejected_aloud(wrong: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    trial, ran = offering((ONES, ONES), (wrong, ONES))
    assert not any(kernels.holds("Sums", ("here",), trial) for _ in range(2))
    assert len(ran) == len(caplog.records) == 1
    assert "Sums differ from plain operations by" in caplog.text


def test_a_kernel_that_cannot_run_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def trial() -> Iterator[tuple[Tensor, Tensor]]:
        yield ONES, ONES
        raise ImportError("there is no such library")

    assert not any(kernels.holds("Sums", ("here",), trial) for _ in range(2))
    assert len(caplog.records) == 1
    assert "Sums cannot run here (here): there is no such library" in caplog.text


def test_full_memory_does_not_disable_a_kernel() -> None:
    def trial() -> Iterator[tuple[Tensor, Tensor]]:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        kernels.holds("Sums", ("here",), trial)
    assert kernels.holds("Sums", ("here",), offering((ONES, ONES))[0])


def test_a_graph_that_is_captured_waits_for_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, ran = offering((ONES, ONES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not kernels.holds("Sums", ("here",), trial)
    assert not ran
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernels.holds("Sums", ("here",), trial)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernels.holds("Sums", ("here",), trial)


def test_a_trial_draws_nothing_from_the_run() -> None:
    before = torch.get_rng_state()
    one = kernels.drawn(2, 3, seed=0, device=torch.device("cpu"), dtype=torch.float16)
    assert one.shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)
