"""SIGKILL at any instant of any kind of run, then a resume: its end must be that of a run that no one killed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from functools import partial

from tests.faults.judging import Outcome, Verdict, judge_end
from tests.faults.world import Trial, World, go_on

KILLS = 440
"""At random instants; `calls.py` adds those at each system call of a save."""
_MOST = 4
"""Kills of one run."""


def trials(world: World, seed: int, only: Sequence[str] = ()) -> Iterator[Trial]:
    """Yield killed runs, all kinds (or `only` these) in turn, until they have been killed `KILLS` times.

    A run that ends before its kill arrives counts too; it is seldom.
    """
    draw = random.Random(f"{seed} kills")
    names = [kind for kind in only or world.undisturbed if world.undisturbed[kind].repeats]
    killed = turn = 0
    while killed < KILLS and names:
        kind = names[turn % len(names)]
        shares = [draw.uniform(0.02, 0.98)]
        while len(shares) < _MOST and draw.random() < 0.35:
            shares.append(draw.uniform(0.02, 0.98))
        killed += len(shares)
        name = f"{kind} killed at {', '.join(f'{share:.1%}' for share in shares)}"
        yield Trial(name, partial(_killed, world, kind, tuple(shares), f"{kind}-{turn}"))
        turn += 1


def _killed(world: World, kind: str, shares: tuple[float, ...], place: str) -> Verdict:
    whole = world.undisturbed[kind]
    run, log = world.scratch / place, world.scratch / f"{place}.log"
    kills = 0
    try:
        for share in shares:
            ended = go_on(world, kind, run, log, kill_after=share * whole.seconds)
            if ended.code != -9:
                break
            kills += 1
        else:
            ended = go_on(world, kind, run, log)
        verdict = judge_end(ended, run, whole.remains, kills=kills)
        return (
            verdict if verdict.outcome is not Outcome.CLEAR else Verdict(Outcome.LOST, verdict.detail, kills)
        )
    finally:
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)
