"""How many bytes of tensors are alive while something runs, by the memory events of torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


class Live(NamedTuple):
    """Bytes more than before."""

    peak: int
    left: int
    """At the end."""


def live_bytes(work: Callable[[], T]) -> tuple[T, Live]:
    """Return what `work` returns, and the bytes of its tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = work()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return made, Live(peak, live)
