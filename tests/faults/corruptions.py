"""Damaged run directories: what a resume, an evaluation and every reader make of them.

Most trials damage one file and read everything that the library reads of a run, in one process and with each file put
right again after its trial: thousands a minute. The others resume the damaged run to its end, or evaluate it, by the
command line in a process of their own. Weights are never other ones than those of a whole checkpoint. Rows and
episodes carry no hash: a digit of theirs that has turned into another is not seen, and counts as recovered.
"""

from __future__ import annotations

import json
import random
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.calls import half_way
from tests.faults.forks import Ended, command, fork
from tests.faults.judging import (
    Outcome,
    Verdict,
    defect_of,
    differing,
    hashed,
    judge_end,
    kept_bytes,
    last_line,
    remains,
    state_hash,
)
from tests.faults.world import Trial, World, go_on

from kapelle.errors import KapelleError

KINDS = ("demo", "mrlm_ppo", "maverl_debate_qmix")
READ, RESUMED, EVALUATED = 9500, 400, 100
_BATCH = 100
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Damage:
    """One file with other content, or none."""

    path: str
    """Relative to the run."""
    how: str
    content: bytes | None
    """None for a file that is gone."""

    def apply(self, run: Path) -> None:
        """Put the damage in the place of the file."""
        file = run / self.path
        if self.content is None:
            file.unlink()
        else:
            file.write_bytes(self.content)


def _flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(0, len(content), _PAGE)
    return content[:start] + b"\0" * len(content[start : start + _PAGE]) + content[start + _PAGE :]


def _doubled(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    return content[: start + 64] + content[start:]


_WAYS: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": _flipped,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "emptied": lambda _content, _draw: b"",
    "a page of zeros": _zeroed,
    "bytes appended": lambda content, draw: content + draw.randbytes(draw.randint(1, 99)),
    "a piece twice": _doubled,
    "other bytes": lambda content, draw: draw.randbytes(len(content)),
}


def draw_damage(run: Path, draw: random.Random) -> Damage:
    """Return a damage of one file of a run; half of them flip a bit."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "lock")
    file = draw.choice(files)
    content, path = file.read_bytes(), file.relative_to(run).as_posix()
    how = "a bit flipped" if draw.random() < 0.5 else draw.choice([*_WAYS, "removed", "swapped"])
    if how == "removed":
        return Damage(path, how, None)
    if how == "swapped" or not content:
        other = draw.choice(
            [each for each in files if each.name == file.name or draw.random() < 0.2] or files
        )
        return Damage(path, f"swapped with {other.relative_to(run).as_posix()}", other.read_bytes())
    return Damage(path, how, _WAYS[how](content, draw))


def trials(world: World, seed: int) -> Iterator[Trial]:
    """Yield damaged runs: read, resumed and evaluated."""
    bases = {kind: half_way(world, kind) for kind in KINDS}
    for number in range(READ // _BATCH):
        kind = KINDS[number % len(KINDS)]
        place = world.scratch / f"read-{number}"
        draw = random.Random(f"{seed} read {number}")
        yield Trial(f"reading {kind}, {number}", partial(_read_batch, bases[kind], place, draw))
    for number in range(RESUMED):
        kind = KINDS[number % len(KINDS)]
        draw = random.Random(f"{seed} resumed {number}")
        place = world.scratch / f"resumed-{number}"
        yield Trial(f"resuming {kind}, {number}", partial(_resumed, world, kind, bases[kind], place, draw))
    whole = {kind: _evaluation(bases[kind], world.scratch / "whole.log")[1] for kind in KINDS}
    for number in range(EVALUATED):
        kind = KINDS[number % len(KINDS)]
        draw = random.Random(f"{seed} evaluated {number}")
        place = world.scratch / f"evaluated-{number}"
        yield Trial(
            f"evaluating {kind}, {number}", partial(_evaluated, whole[kind], bases[kind], place, draw)
        )


def _read_batch(base: Path, place: Path, draw: random.Random) -> list[tuple[str, Verdict]]:
    shutil.copytree(base, place)
    damages = [draw_damage(base, draw) for _ in range(_BATCH)]
    log, notes = place.with_suffix(".log"), place.with_suffix(".notes")
    ended = fork(partial(_read_all, base, place, damages, notes), log)
    rows = [line.split("\t", 1) for line in notes.read_text("utf-8").splitlines()]
    found = [(f"{d.path}: {d.how}", Verdict(Outcome(o), t)) for d, (o, t) in zip(damages, rows, strict=False)]
    if len(found) < len(damages):
        died = defect_of(ended) or (Outcome.TRACEBACK, last_line(ended.said))
        damage = damages[len(found)]
        found.append((f"{damage.path}: {damage.how}", Verdict(*died)))
    shutil.rmtree(place)
    for file in (log, notes):
        file.unlink(missing_ok=True)
    return found


def _read_all(base: Path, run: Path, damages: Sequence[Damage], notes: Path) -> int:
    whole = _states(base)
    rows = _rows(base)
    with notes.open("w", encoding="utf-8") as file:
        for damage in damages:
            damage.apply(run)
            verdict = _judge_reading(run, whole, rows)
            file.write(f"{verdict.outcome}\t{' '.join(verdict.detail.split())}\n")
            file.flush()
            shutil.copyfile(base / damage.path, run / damage.path)
    return 0


def _states(run: Path) -> dict[str, str]:
    from kapelle.runs import checkpoint

    folders = checkpoint.list_checkpoints(run / "checkpoints")
    return {folder.name: state_hash(checkpoint.load(folder)) for folder in folders}


def _judge_reading(run: Path, whole: Mapping[str, str], rows: Mapping[str, str]) -> Verdict:
    from kapelle.runs import checkpoint
    from kapelle.runs.reader import read_latest

    try:
        newest = read_latest(run)
        if newest is not None and state_hash(checkpoint.load(newest)) != whole[newest.name]:
            return Verdict(Outcome.LOST, f"other weights in {newest.name}")
        if newest is None:
            return Verdict(Outcome.LOST, "no whole checkpoint is found, and one is whole")
        same = _rows(run) == rows
    except KapelleError as error:
        return Verdict(Outcome.CLEAR, str(error))
    except Exception:
        return Verdict(Outcome.TRACEBACK, " | ".join(traceback.format_exc().splitlines()[-5:]))
    fallback = newest.name != max(whole)
    return Verdict(Outcome.BITWISE if same and not fallback else Outcome.RECOVERED)


def _rows(run: Path) -> dict[str, str]:
    """Return a hash of everything that is read of a run beside its checkpoints."""
    from kapelle.runs.reader import (
        episode_steps,
        read_config,
        read_evaluations,
        read_groups,
        read_metrics,
        read_provenance,
        read_status,
    )
    from kapelle.setup.recipe import load_recipe

    found: dict[str, object] = {
        "config": read_config(run),
        "recipe": repr(load_recipe(str(run / "config.yaml")).config),
        "status": read_status(run),
        "provenance": read_provenance(run),
        "metrics": read_metrics(run),
        "evaluations": read_evaluations(run),
    }
    for step in episode_steps(run):
        found[f"episodes {step}"] = read_groups(run, step)
    return {name: hashed(repr(value).encode()) for name, value in found.items()}


def _resumed(
    world: World, kind: str, base: Path, run: Path, draw: random.Random
) -> list[tuple[str, Verdict]]:
    damage, log = draw_damage(base, draw), run.with_suffix(".log")
    shutil.copytree(base, run)
    try:
        damage.apply(run)
        before = kept_bytes(run)
        ended = go_on(world, kind, run, log)
        expected = world.undisturbed[kind].remains
        verdict = judge_end(ended, run, expected) if _can_be_read(run) else _unread(ended.code, run)
        if verdict.outcome is Outcome.LOST:
            # A row or an episode of before the checkpoint that was damaged stays so; it decides no weight.
            # So does the place to which a checkpoint says that whole rows of it reach.
            lost = damage.path.rpartition("/")[0]
            parts = set(differing(remains(run), expected)) - {f"state/loop/positions/{lost}"}
            other = {part.split("/")[0] for part in parts}
            if other <= {"metrics", "evaluations", "episodes"} and damage.path.endswith(
                (".jsonl", ".jsonl.zst")
            ):
                verdict = Verdict(Outcome.RECOVERED, verdict.detail)
        if verdict.outcome is Outcome.CLEAR and any(not (run / name).exists() for name in before):
            verdict = Verdict(Outcome.LOST, f"something kept is gone: {verdict.detail}")
        return [(f"resumed {kind}: {damage.path}: {damage.how}", verdict)]
    finally:
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)


def _can_be_read(run: Path) -> bool:
    try:
        remains(run)
    except KapelleError:
        return False
    return True


def _unread(code: int | None, run: Path) -> Verdict:
    return Verdict(
        Outcome.RECOVERED, f"{run.name} went on with a row that nobody can read (exit code {code})"
    )


def _evaluation(run: Path, log: Path) -> tuple[Ended, dict[str, Any]]:
    ended = fork(command("eval", run, "evaluation.problems=2", "--no-baselines", "--json"), log)
    log.unlink(missing_ok=True)
    rows = [line for line in ended.said.splitlines() if line.startswith("{")]
    row = json.loads(rows[-1]) if ended.code == 0 and rows else {}
    return ended, {key: value for key, value in row.items() if key != "player"}


def _evaluated(
    whole: Mapping[str, Any], base: Path, run: Path, draw: random.Random
) -> list[tuple[str, Verdict]]:
    damage = draw_damage(base, draw)
    shutil.copytree(base, run)
    try:
        damage.apply(run)
        ended, row = _evaluation(run, run.with_suffix(".log"))
        broken = defect_of(ended)
        if broken:
            verdict = Verdict(*broken)
        elif ended.code != 0:
            verdict = Verdict(Outcome.CLEAR, last_line(ended.said))
        elif row == whole:
            verdict = Verdict(Outcome.BITWISE)
        else:
            announced = "skipped a checkpoint" in ended.said and row.get("steps") != whole["steps"]
            verdict = Verdict(Outcome.RECOVERED if announced else Outcome.LOST, "another result")
        return [(f"evaluated: {damage.path}: {damage.how}", verdict)]
    finally:
        shutil.rmtree(run, ignore_errors=True)
