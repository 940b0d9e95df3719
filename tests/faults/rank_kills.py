"""SIGKILL of one rank, or of all at once, at any place of a run of several processes, in a resume too; then it continues.

With the same number of processes its end must be that of a run that no one killed, bitwise. With another number sums of
gradients are rounded otherwise: then steps, episodes and evaluations are the same, and weights to 1e-5.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.faults.judging import Outcome, Verdict, differing, last_line, remains
from tests.faults.world import Trial, World
from tests.support.episode_lines import lines_in
from tests.support.killed_ranks import AT_RESUME, WHERE, Kill, Way, said, train
from tests.support.killed_runs import Death

WAYS = (Way("ddp"), Way("ddp", background=True), Way("fsdp"), Way("fsdp", background=True))
RANKS = 2
ROUNDING = 1e-5
SECONDS = 4.0
"""About what a run takes from its first file to its end."""


def trials(world: World, seed: int) -> Iterator[Trial]:
    """Yield a trial for every way, place and rank, and as many killed after a random time; some are killed twice."""
    draw = random.Random(f"{seed} ranks")
    for way in WAYS:
        for place in WHERE:
            if not way.background and place in ("save begun", "in a meeting aside"):
                continue
            for rank in (None, *range(RANKS)):
                for kill in (
                    Kill(Death(place, draw.randint(1, 4)), rank=rank),
                    Kill(after=draw.uniform(0.1, SECONDS), rank=rank),
                ):
                    again = Kill(
                        Death(draw.choice(AT_RESUME), draw.randint(1, 2)), rank=draw.choice((None, 0, 1))
                    )
                    kills = (kill, again) if draw.random() < 0.4 else (kill,)
                    ranks = draw.choice((RANKS, RANKS, RANKS, 1, 3))
                    what = ", then ".join(str(each) for each in kills)
                    name = f"{way.engine}{' in the background' if way.background else ''}: {what}; resumed by {ranks}"
                    yield Trial(
                        name, partial(_killed, world, way, kills, ranks, f"ranks-{draw.getrandbits(48):x}")
                    )


def _killed(world: World, way: Way, kills: tuple[Kill, ...], ranks: int, place: str) -> Verdict:
    whole = _whole(world, way)
    folder = world.scratch / place
    run, sent = folder / "run", 0
    run.parent.mkdir(parents=True)
    try:
        for kill in kills:
            codes = train(way, run, RANKS, kill)
            sent += codes.count(-9)
            if None in codes:
                return Verdict(Outcome.HUNG, last_line(said(run)), sent)
            # The others say in one line who is gone; a run that came to its end before is as good.
            if any(code not in (-9, 2, 0) for code in codes):
                return Verdict(Outcome.TRACEBACK, f"exit codes {codes}: {last_line(said(run))}", sent)
        codes = train(way, run, ranks)
        if codes != [0] * ranks:
            return Verdict(
                Outcome.HUNG if None in codes else Outcome.LOST, f"{codes}: {last_line(said(run))}", sent
            )
        other = differing(remains(run), remains(whole)) if ranks == RANKS else apart(run, whole)
        return Verdict(Outcome.LOST if other else Outcome.BITWISE, ", ".join(other[:4]), sent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _whole(world: World, way: Way) -> Path:
    """Return a run of this way that no one killed; the first worker to ask makes it."""
    folder = world.folder / "whole" / f"{way.engine}-{way.background}"
    if not folder.exists():
        beside = world.scratch / f"whole-{random.getrandbits(48):x}"
        beside.mkdir(parents=True)
        codes = train(way, beside / "run", RANKS)
        assert codes == [0] * RANKS, said(beside / "run")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            (beside / "run").rename(folder)
        except OSError:  # another worker was first
            shutil.rmtree(beside)
    return folder


def apart(run: Path, whole: Path) -> list[str]:
    """Return in what a run differs from another by more than rounding."""
    from kapelle.runs import checkpoint
    from kapelle.runs.reader import read_latest, read_metrics

    ends = [read_latest(place) for place in (run, whole)]
    assert None not in ends
    one, other = (dict(_tensors(checkpoint.load(end)["train"], "train")) for end in ends if end is not None)
    wrong = [name for name in other if not torch.allclose(one[name], other[name], rtol=0, atol=ROUNDING)]
    rows = [[row["step"] for row in read_metrics(place)] for place in (run, whole)]
    wrong += ["metrics"] if rows[0] != rows[1] else []
    return wrong + [name for name in _episodes(whole) if _episodes(run).get(name) != _episodes(whole)[name]]


def _tensors(tree: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, Mapping):
        for key, inner in tree.items():
            if key != "scaler":
                yield from _tensors(inner, f"{place}/{key}")


def _episodes(run: Path) -> dict[str, list[list[list[int]]]]:
    """Return the tokens that were sampled, in each step."""
    found = {}
    for name, lines in lines_in(run).items():
        rows = [json.loads(line) for line in lines.splitlines()]
        found[name] = [[turn["completion_ids"] for turn in row["turns"]] for row in rows]
    return found
