"""One run that continues under a disturbance, and once more without it where it ended with a message."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.judging import Outcome, Verdict, defect_of, judge_end, last_line
from tests.faults.world import World, go_on

Call = Callable[[], int]


def disturbed(
    world: World, kind: str, begun: Path, within: Callable[[Call], Call], place: str, then: str
) -> Verdict:
    """Judge a run that continues from `begun` within a disturbance; `then` says how it continues after a message."""
    run, log = world.scratch / place, world.scratch / f"{place}.log"
    expected = world.undisturbed[kind].remains
    shutil.copytree(begun, run)
    try:
        ended = go_on(world, kind, run, log, within=within)
        broken = defect_of(ended)
        if broken is not None:
            return Verdict(*broken)
        if ended.code == 0:
            return judge_end(ended, run, expected)
        # All is well again: whoever reads the message and resumes comes to the same end.
        after = judge_end(go_on(world, kind, run, log), run, expected)
        if after.outcome is Outcome.BITWISE:
            return Verdict(Outcome.CLEAR, last_line(ended.said))
        outcome = Outcome.LOST if after.outcome is Outcome.CLEAR else after.outcome
        return Verdict(outcome, f"{last_line(ended.said)} — then, {then}: {after.detail}")
    finally:
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)
