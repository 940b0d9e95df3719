"""A machine that loses its power at any instant: what is left on the disk, and a resume from it.

A recorded run is a list of changes. For every prefix of it the disk may hold any state that its flushes allow, by the
strict reading of POSIX: what was written to a file since that file was flushed may be there, half there or not, and
the entries of a folder since that folder was flushed may be there up to any point of their order. Two states are tried
for each prefix: nothing that was not flushed, and a mixture drawn from the seed. (That all of it is there is what a
SIGKILL leaves; see `calls.py`.) Both a whole run and one that is resumed half way are cut in this way.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from tests.faults import shim
from tests.faults.calls import KIND, half_way
from tests.faults.judging import Outcome, Verdict, judge_end
from tests.faults.shim import Action, Calls, Operation, Plan
from tests.faults.world import Trial, World, go_on

_FLUSHED = "only what was flushed is there"
_STATES = (_FLUSHED, "a part of the rest is there")


@dataclass(slots=True)
class _File:
    """A file by itself, whatever it is called: its content now, and what a crash may leave of it."""

    content: bytes = b""
    flushed: bytes = b""


@dataclass(slots=True)
class _Folder:
    """A folder's entries now, and the changes of them that no flush has made sure of."""

    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    sure: dict[str, _File | _Folder] = field(default_factory=dict)
    unsure: list[dict[str, _File | _Folder | None]] = field(default_factory=list)
    """Each change: name → what it names from then on, None for nothing. A renaming is one change of two names."""

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        """Make a change of this folder's names."""
        self.unsure.append(names)
        _set(self.entries, names)

    def flush(self) -> None:
        """Make sure of the names, and of no content behind them."""
        self.sure, self.unsure = dict(self.entries), []


def _set(entries: dict[str, _File | _Folder], names: dict[str, _File | _Folder | None]) -> None:
    for name, what in names.items():
        if what is None:
            entries.pop(name, None)
        else:
            entries[name] = what


def trials(world: World, seed: int) -> Iterator[Trial]:
    """Yield every prefix of the changes that a run, and a resume, make, in each state that is tried."""
    for begun in (None, half_way(world, KIND)):
        operations = _record(world, begun)
        what = "run" if begun is None else "resume"
        for length in range(len(operations) + 1):
            for state in _STATES:
                name = f"power lost after {length} changes of a {what}, {state}"
                draw = random.Random(f"{seed} {name}")
                place = f"crash-{what}-{length}-{_STATES.index(state)}"
                yield Trial(name, partial(_crashed, world, begun, operations[:length], state, draw, place))


def _record(world: World, begun: Path | None) -> list[Operation]:
    run, log = world.scratch / "recorded", world.scratch / "recorded.operations"
    run.mkdir() if begun is None else shutil.copytree(begun, run)
    within = partial(shim.under, Plan(run, Action.RECORD, classes=Calls.CHANGES), counted=log)
    go_on(world, KIND, run, world.scratch / "recorded.log", within=within)
    operations = list(shim.read_operations(log, run))
    _check_recording(begun, operations, run)
    shutil.rmtree(run)
    return operations


def _check_recording(begun: Path | None, operations: Sequence[Operation], run: Path) -> None:
    disk = _replayed(begun, operations)
    replayed = {path: file.content for path, file in _files(disk)}
    found = {p.relative_to(run).as_posix(): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    wrong = {path for path in replayed.keys() | found.keys() if replayed.get(path) != found.get(path)}
    assert not wrong, f"the recording misses changes of {sorted(wrong)}"


def _crashed(
    world: World,
    begun: Path | None,
    operations: Sequence[Operation],
    state: str,
    draw: random.Random,
    place: str,
) -> Verdict:
    run, log = world.scratch / place, world.scratch / f"{place}.log"
    disk = _replayed(begun, operations)
    try:
        _leave(disk, run, state, draw)
        verdict = judge_end(go_on(world, KIND, run, log), run, world.undisturbed[KIND].remains)
        # What a save has promised is there: nothing may stop the resume.
        return verdict if verdict.outcome is not Outcome.CLEAR else Verdict(Outcome.LOST, verdict.detail)
    finally:
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)


def _replayed(begun: Path | None, operations: Sequence[Operation]) -> _Folder:
    disk = _Folder() if begun is None else _read(begun)
    for operation in operations:
        _apply(disk, operation)
    return disk


def _read(folder: Path) -> _Folder:
    made = _Folder()
    for path in sorted(folder.iterdir()):
        content = b"" if path.is_dir() else path.read_bytes()
        made.entries[path.name] = _read(path) if path.is_dir() else _File(content, content)
    made.flush()
    return made


def _apply(root: _Folder, operation: Operation) -> None:
    path = PurePosixPath(operation.path)
    folder = _folder(root, path.parent)
    if operation.kind is Calls.MKDIR:
        folder.change({path.name: _Folder()})
    elif operation.kind is Calls.OPEN:
        folder.change({path.name: _File()})
    elif operation.kind is Calls.UNLINK:
        folder.change({path.name: None})
    elif operation.kind is Calls.RENAME:
        target = PurePosixPath(operation.target)
        assert target.parent == path.parent, "what moves between folders is another matter"
        folder.change({target.name: folder.entries[path.name], path.name: None})
    elif operation.kind is Calls.FSYNC:
        what = folder.entries[path.name] if path.name else root
        if isinstance(what, _Folder):
            what.flush()
        else:
            what.flushed = what.content
    else:
        file = folder.entries[path.name]
        assert isinstance(file, _File), f"{path} is written to"
        _change(file, operation)


def _change(file: _File, operation: Operation) -> None:
    start, data = operation.offset, operation.data
    if operation.kind is Calls.TRUNCATE:
        file.content = file.content[:start].ljust(start, b"\0")
    else:
        file.content = file.content[:start].ljust(start, b"\0") + data + file.content[start + len(data) :]


def _folder(root: _Folder, path: PurePosixPath) -> _Folder:
    for part in path.parts:
        inner = root.entries[part]
        assert isinstance(inner, _Folder), f"{path} is not a folder"
        root = inner
    return root


def _files(folder: _Folder, place: str = "") -> Iterator[tuple[str, _File]]:
    for name, what in folder.entries.items():
        if isinstance(what, _Folder):
            yield from _files(what, f"{place}{name}/")
        else:
            yield f"{place}{name}", what


def _leave(folder: _Folder, path: Path, state: str, draw: random.Random) -> None:
    """Write what a crash leaves of a folder."""
    path.mkdir()
    kept = 0 if state == _FLUSHED else draw.randint(0, len(folder.unsure))
    entries = dict(folder.sure)
    for names in folder.unsure[:kept]:
        _set(entries, names)
    for name, what in entries.items():
        if isinstance(what, _Folder):
            _leave(what, path / name, state, draw)
        else:
            (path / name).write_bytes(_left_of(what, state, draw))


def _left_of(file: _File, state: str, draw: random.Random) -> bytes:
    if state == _FLUSHED or file.content == file.flushed:
        return file.flushed
    if file.content.startswith(file.flushed):
        return file.content[: draw.randint(len(file.flushed), len(file.content))]
    return draw.choice([file.flushed, file.content, b"\0" * len(file.content)])
