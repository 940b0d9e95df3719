"""The kinds of faults, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.faults import calls, corruptions, crashes, kills, limits, oddities, planted, rank_kills, shim
from tests.faults.world import Trial, World


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    title: str
    about: str
    trials: Callable[[World, int], Iterator[Trial]]
    missing: Callable[[], str | None] = _nothing
    """Why this machine cannot try it; None when it can."""
    runs: tuple[str, ...] | None = (calls.KIND,)
    """The kinds of run that it is about; None for all."""
    weight: float = 1.0
    """Its share of the time, beside the others'; what one does not need is the next ones'."""


KINDS: Mapping[str, Fault] = {
    "kills": Fault(
        "SIGKILL at any instant, then a resume", "all kinds of run", kills.trials, runs=None, weight=6
    ),
    "killed-calls": Fault(
        "SIGKILL before each change that a resume and its saves make",
        "demo",
        calls.killed,
        shim.missing,
        weight=2,
    ),
    "killed-stages": Fault(
        "SIGKILL before each change around the end of a stage",
        calls.STAGED,
        calls.killed_between_stages,
        shim.missing,
        runs=(calls.STAGED,),
        weight=3,
    ),
    "calls": Fault(
        "each read, open, write, flush, renaming or deletion of a resume and its saves fails",
        "demo: EIO, a full disk, no descriptors; once and from there on",
        calls.failing,
        shim.missing,
        weight=7,
    ),
    "ranks": Fault(
        "SIGKILL of one rank, or of all, anywhere in a run of two processes, then a resume by one, two or three",
        "ddp and fsdp, saves that wait and saves in the background",
        rank_kills.trials,
        runs=(),
        weight=4,
    ),
    "crashes": Fault(
        "the power fails after each change that a run or a resume makes; unflushed changes are lost, or half there",
        "demo",
        crashes.trials,
        shim.missing,
        weight=5,
    ),
    "corruptions": Fault(
        "a file of a run is damaged: bits, cuts, zeros, swaps, removals",
        "read, resumed, evaluated",
        corruptions.trials,
        shim.missing,
        runs=corruptions.KINDS,
        weight=6,
    ),
    "worlds": Fault(
        "an environment misbehaves on every third task",
        "raises, leaves, hangs, pays what is no pay",
        oddities.environments,
        runs=(),
    ),
    "servers": Fault(
        "the server of an agent or of a judge answers anything else",
        "errors, garbage, without end, not at all",
        oddities.endpoints,
        runs=(),
    ),
    "limits": Fault(
        "a process has too few descriptors or bytes of a file or of memory",
        "resumed under the limit, then without it",
        limits.trials,
        shim.missing,
        runs=limits.KINDS,
    ),
    "clocks": Fault(
        "the time of day is wrong, goes back and jumps",
        "years",
        limits.clocks,
        shim.missing,
        runs=limits.KINDS,
    ),
    "planted": Fault(
        "losses planted in the library, each seen by the harness",
        "a clear error is a plant that was seen",
        planted.trials,
        shim.missing,
        runs=planted.RUNS,
        weight=3,
    ),
}
