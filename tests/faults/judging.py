"""What a run leaves behind, and what a trial came to: bitwise equal, recovered, a clear error, or a defect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.faults.forks import Ended


class Outcome(StrEnum):
    """What a trial came to. The last three are defects of the library."""

    BITWISE = "bitwise"
    """The end is that of the undisturbed run: weights, optimisers, generators, rows and episodes, bitwise."""
    RECOVERED = "recovered"
    """The run continued by a way that it announced, or a thing failed that is not the run: all else is as it was."""
    CLEAR = "clear error"
    """Rejected or stopped in one line that says what is wrong, with everything that was kept still there."""
    LOST = "lost"
    """It ended well with other weights, rows or episodes, or something that was kept is gone."""
    HUNG = "hung"
    TRACEBACK = "traceback"


DEFECTS = (Outcome.LOST, Outcome.HUNG, Outcome.TRACEBACK)

Remains = Mapping[str, str]
"""Part of a run → hash of it. What tells the time, or where the run lies, is omitted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial came to, and what was seen."""

    outcome: Outcome
    detail: str = ""
    kills: int = 0
    """SIGKILLs that were sent."""


def remains(run: Path) -> dict[str, str]:
    """Return what a run has come to, a folder of stages too; raises KapelleError for one that cannot be read."""
    if (run / "stages.yaml").is_file():
        found = {"stages.yaml": hashed(_plain(run / "stages.yaml", run))}
        for number, stage in enumerate(sorted(path.parent for path in run.glob("*/config.yaml"))):
            parts = _remains(stage, run)
            # A stage begins with the generators of its process: those of the stage before, or new ones.
            compared = {k: v for k, v in parts.items() if not (number and k.startswith("state/loop/random"))}
            found |= {f"{stage.name}/{part}": value for part, value in compared.items()}
        return found
    return _remains(run, run)


def _remains(run: Path, whole: Path) -> dict[str, str]:
    from kapelle.runs import checkpoint
    from kapelle.runs.reader import read_evaluations, read_latest, read_metrics, read_status
    from kapelle.runs.step_rows import lines_of, stored_steps

    status = read_status(run)
    found = {
        "end": f"{status.state} {status.step}",
        "config.yaml": hashed(_plain(run / "config.yaml", whole)),
    }
    found["metrics"] = hashed(_untimed(read_metrics(run)))
    found["evaluations"] = hashed(read_evaluations(run))
    for folder in sorted(run.glob("episodes/*")):
        for step, stored in stored_steps(folder).items():
            found[f"episodes/{folder.name}/{step}"] = hashed(_placeless(b"\n".join(lines_of(stored)), whole))
    newest = read_latest(run)
    if newest is None:
        return found
    state = checkpoint.load(newest)
    state["loop"]["positions"].pop("metrics.jsonl")  # its rows tell the time
    for part, tree in state.items():
        for name, value in _leaves(tree, part):
            found[f"state/{name}"] = value
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        name = file.relative_to(newest).as_posix()
        # What ranks have shared out is in the state; who has which file depends on who learned what last.
        if "/" in name and not name.startswith("train/"):
            found[f"kept/{name}"] = hashed(_plain(file, whole))
    found["checkpoint"] = newest.name.partition("-")[0]  # a step that is saved again has another ending
    return found


def kept_bytes(run: Path) -> dict[str, bytes]:
    """Return the rows, episodes and checkpoints that lie in a run: what an error must not take away."""
    found = {}
    for pattern in (
        "**/metrics.jsonl",
        "**/evaluations.jsonl",
        "**/episodes/*/*.jsonl.zst",
        "**/checkpoints/[0-9]*/*",
    ):
        for file in run.glob(pattern):
            if file.is_file():
                found[file.relative_to(run).as_posix()] = file.read_bytes()
    return found


def differing(found: Remains, expected: Remains) -> list[str]:
    """Return the parts that differ, those of one side alone too."""
    return sorted(part for part in found.keys() | expected.keys() if found.get(part) != expected.get(part))


def judge_end(ended: Ended, run: Path, expected: Remains, *, kills: int = 0) -> Verdict:
    """Judge a run that was to continue to its end."""
    broken = defect_of(ended)
    if broken is not None:
        return Verdict(*broken, kills)
    if ended.code != 0:
        return Verdict(Outcome.CLEAR, last_line(ended.said), kills)
    other = differing(remains(run), expected)
    if other:
        return Verdict(Outcome.LOST, f"differs in {', '.join(other[:4])} ({len(other)} parts)", kills)
    return Verdict(Outcome.BITWISE, "", kills)


def defect_of(ended: Ended) -> tuple[Outcome, str] | None:
    """Return what is wrong with the end of a process by itself: it hung, died, or showed a traceback."""
    if ended.code is None:
        return Outcome.HUNG, last_line(ended.said)
    if "Traceback (most recent call last)" in ended.said:
        return Outcome.TRACEBACK, last_line(ended.said)
    if ended.code < 0:
        return Outcome.TRACEBACK, f"ended by signal {-ended.code}: {last_line(ended.said)}"
    if ended.code != 0 and "kapelle: " not in ended.said and "stopped" not in ended.said:
        return Outcome.TRACEBACK, f"exit code {ended.code} without a reason: {last_line(ended.said)}"
    return None


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""


def _plain(file: Path, whole: Path) -> bytes:
    """Return a file's content without the place where the run lies; nothing for a file that is gone."""
    return _placeless(file.read_bytes() if file.is_file() else b"", whole)


def _placeless(content: bytes, whole: Path) -> bytes:
    return content.replace(str(whole.resolve()).encode(), b"RUN").replace(str(whole).encode(), b"RUN")


def _untimed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def _leaves(tree: Any, place: str) -> list[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{place}/{key}")]
    return [(place, hashed(tree))]


def state_hash(state: Mapping[str, Any]) -> str:
    """Return a hash of everything that a checkpoint holds."""
    return hashed(_leaves(state, "state"))


def hashed(value: Any) -> str:
    """Return a hash of a tree of plain values and tensors: of their types, shapes and bits."""
    return hashlib.blake2b(_bytes(value), digest_size=12).hexdigest()


def _bytes(value: Any) -> bytes:
    import torch

    if isinstance(value, bytes):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        return (
            f"{flat.dtype} {tuple(flat.shape)} ".encode()
            + flat.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(value, Mapping):
        return (
            b"{" + b",".join(repr(key).encode() + b":" + _bytes(each) for key, each in value.items()) + b"}"
        )
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"(" + b",".join(map(_bytes, value)) + b")"
    return f"{type(value).__name__} {json.dumps(value) if isinstance(value, float) else value!r}".encode()
