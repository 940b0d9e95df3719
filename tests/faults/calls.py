"""Every system call of a save and of a resume, failing once or from there on, or the last that the process makes.

The shim counts the calls on files of the run. A first run says how many there are; then each is broken in a run of its
own. safetensors renames its files by asking the kernel itself, past the C library: those calls are not reached.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults import shim
from tests.faults.disturbed import disturbed
from tests.faults.judging import Outcome, Verdict, judge_end
from tests.faults.recipes import STEPS
from tests.faults.shim import Action, Calls, Plan
from tests.faults.world import Trial, World, go_on

KIND = "demo"
STAGED = "mrlm_hybrid"
_OF_STAGES = 130
"""Changes from the half of the first stage until the second has begun."""
_WAYS = (
    (Calls.ALL, errno.EIO, Action.FAIL),
    (Calls.ALL, errno.EIO, Action.FAIL_FOR_GOOD),
    (Calls.CHANGES, errno.ENOSPC, Action.FAIL),
    (Calls.CHANGES, errno.ENOSPC, Action.FAIL_FOR_GOOD),
    (Calls.OPEN, errno.EMFILE, Action.FAIL),
    (Calls.OPEN, errno.EMFILE, Action.FAIL_FOR_GOOD),
)


def failing(world: World, seed: int) -> Iterator[Trial]:
    """Yield a resume and its saves for each call that can fail and each way to fail."""
    del seed  # every call is tried
    begun = half_way(world, KIND)
    for classes, number, action in _WAYS:
        for at in range(1, _count(world, KIND, begun, classes) + 1):
            plan = partial(Plan, action=action, at=at, classes=classes, number=number)
            how = "from there on" if action is Action.FAIL_FOR_GOOD else "once"
            name = f"call {at} of {classes.name} fails with {errno.errorcode[number]} {how}"
            yield Trial(name, partial(_failed, world, begun, plan, f"call-{classes}-{number}-{action}-{at}"))


def killed(world: World, seed: int) -> Iterator[Trial]:
    """Yield a resume and its saves for each call that changes something, killed right before it."""
    del seed
    yield from _each_killed(world, KIND, half_way(world, KIND))


def killed_between_stages(world: World, seed: int) -> Iterator[Trial]:
    """Yield the same for the end of one stage and the beginning of the next."""
    del seed
    yield from _each_killed(world, STAGED, half_way(world, STAGED), _OF_STAGES)


def _each_killed(world: World, kind: str, begun: Path, most: int | None = None) -> Iterator[Trial]:
    calls = _count(world, kind, begun, Calls.CHANGES)
    for at in range(1, min(calls, most or calls) + 1):
        plan = partial(Plan, action=Action.KILL, at=at, classes=Calls.CHANGES)
        place = f"kill-{kind}-{at}"
        yield Trial(f"{kind} killed before change {at}", partial(_killed, world, kind, begun, plan, place))


def half_way(world: World, kind: str) -> Path:
    """Return a run that was killed behind its checkpoint of half of the steps, with rows that go beyond it."""
    run = world.folder / f"half-{kind.replace(' ', '-')}"
    if run.is_dir():
        return run
    log, recorded = world.scratch / "half.log", world.scratch / "half.operations"
    plan = partial(Plan, classes=Calls.WRITE)
    go_on(world, kind, run, log, within=partial(shim.under, plan(run, Action.RECORD), counted=recorded))
    written = [o.path for o in shim.read_operations(recorded, run) if o.kind is Calls.WRITE]
    at = 2 + [k for k, path in enumerate(written) if "episodes/train/" in path][STEPS // 2]
    shutil.rmtree(run)
    go_on(world, kind, run, log, within=partial(shim.under, plan(run, Action.KILL, at)))
    recorded.unlink()
    return run


def _count(world: World, kind: str, begun: Path, classes: Calls) -> int:
    run, counted = world.scratch / "count", world.scratch / "count.txt"
    shutil.copytree(begun, run)
    plan = Plan(run, Action.COUNT, classes=classes)
    go_on(world, kind, run, world.scratch / "count.log", within=partial(shim.under, plan, counted=counted))
    shutil.rmtree(run)
    return int(counted.read_text("utf-8"))


def _failed(world: World, begun: Path, plan: partial[Plan], place: str) -> Verdict:
    within = partial(shim.under, plan(world.scratch / place))
    return disturbed(world, KIND, begun, within, place, "resumed")


def _killed(world: World, kind: str, begun: Path, plan: partial[Plan], place: str) -> Verdict:
    run, log = world.scratch / place, world.scratch / f"{place}.log"
    shutil.copytree(begun, run)
    try:
        ended = go_on(world, kind, run, log, within=partial(shim.under, plan(run)))
        kills = int(ended.code == -9)
        verdict = judge_end(go_on(world, kind, run, log), run, world.undisturbed[kind].remains, kills=kills)
        return (
            verdict if verdict.outcome is not Outcome.CLEAR else Verdict(Outcome.LOST, verdict.detail, kills)
        )
    finally:
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)
