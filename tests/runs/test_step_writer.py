"""Steps that are appended, cut and deleted: the same steps make the same files, even after a kill."""

import errno
import os
from pathlib import Path

import pytest

from kapelle.runs.step_rows import (
    append_step,
    cut_steps,
    forgettable,
    later_parts,
    lines_of,
    stored_steps,
)

STEPS = 40


def lines(step: int) -> bytes:
    return b"".join(b'{"step":%d,"row":%d}\n' % (step, row) for row in range(step % 3))


def write(folder: Path, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    for step in steps:
        append_step(folder, step, lines(step))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read(folder: Path) -> dict[int, bytes]:
    return {
        step: b"".join(line + b"\n" for line in lines_of(stored))
        for step, stored in stored_steps(folder).items()
    }


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "whole", *range(1, STEPS + 1))
    return tmp_path / "whole"


def test_sixteen_steps_make_a_file(whole: Path) -> None:
    assert list(files(whole)) == ["00000001.jsonl.zst", "00000017.jsonl.zst", "00000033.jsonl.zst"]
    assert read(whole) == {step: lines(step) for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("last", [-1, 1, 16, 17, 39, 40])
def test_steps_that_are_cut_and_written_again_give_the_same_files(whole: Path, last: int) -> None:
    before = files(whole)
    later = {step for part in later_parts(whole, last) for step in part.steps}
    assert later == set(range(max(1, last + 1), STEPS + 1))
    cut_steps(whole, last)
    assert read(whole) == {step: lines(step) for step in range(1, last + 1)}
    write(whole, *range(max(1, last + 1), STEPS + 1))
    assert files(whole) == before


def test_a_killed_writer_continues_with_the_same_files(tmp_path: Path) -> None:
    write(tmp_path / "whole", *range(1, 20))
    before = files(tmp_path / "whole")
    path = tmp_path / "whole" / "00000017.jsonl.zst"
    content = path.read_bytes()
    ends = [stored.frames[-1].end for step, stored in stored_steps(tmp_path / "whole").items() if step > 16]
    for size in sorted({*range(0, len(content), 23), *(end + k for end in ends[:-1] for k in (-1, 0, 1))}):
        for left in (content[:size], content[:size] + bytes(60)):  # what a loss of power leaves ends in zeros
            path.write_bytes(left)
            # A checkpoint counts what was flushed, so that no zeros are among it.
            counted = 16 + sum(size >= end for end in ends)
            assert (
                {*range(1, counted + 1)} <= set(stored_steps(tmp_path / "whole")) <= {*range(1, counted + 2)}
            )
            cut_steps(tmp_path / "whole", counted)
            write(tmp_path / "whole", *range(counted + 1, 20))
            assert files(tmp_path / "whole") == before, size


def test_a_step_that_was_recorded_late_stays_where_it_counts(tmp_path: Path) -> None:
    write(tmp_path / "run", 2, 7, 6, 9)
    cut_steps(tmp_path / "run", 6)
    assert read(tmp_path / "run") == {2: lines(2), 6: lines(6)}


def test_damage_to_a_counted_step_is_kept(whole: Path) -> None:
    path = whole / "00000033.jsonl.zst"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    cut_steps(whole, 40)
    assert path.read_bytes() == bytes(content)
    cut_steps(whole, 34)
    assert {33, 35} & set(stored_steps(whole)) == set()
    assert path.read_bytes() == bytes(content[: path.stat().st_size])


def test_a_copy_by_hard_links_keeps_its_own_content(whole: Path, tmp_path: Path) -> None:
    before = files(whole)
    (tmp_path / "copy").mkdir()
    for path in whole.iterdir():
        os.link(path, tmp_path / "copy" / path.name)
    write(tmp_path / "copy", 41)
    cut_steps(tmp_path / "copy", 35)
    assert files(whole) == before


def test_a_full_disk_takes_no_half_step(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = files(whole), os.write

    def short(descriptor: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:40])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space"):
            append_step(whole, 41, lines(41))
    assert files(whole) == before


def forget(folder: Path, before: int) -> None:
    for path in forgettable(folder, before):
        path.unlink()


def test_old_steps_are_deleted_in_whole_files(whole: Path) -> None:
    forget(whole, 17)
    assert min(stored_steps(whole)) == 17
    forget(whole, 32)
    assert min(stored_steps(whole)) == 17
    forget(whole, 34)
    assert min(stored_steps(whole)) == 33
