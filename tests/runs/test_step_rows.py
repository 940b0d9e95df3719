"""Rows by step: complete, incomplete and damaged; Zstandard's own tools can read the files."""

import io
import struct
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.run_folders import group, open_run

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs import step_rows
from kapelle.runs.reader import episode_steps, read_episodes, read_groups
from kapelle.runs.step_rows import FRAME, lines_of, pack, scan, stored_step, stored_steps

WIDE = [b'{"n":%d,"x":"%s"}\n' % (k, b"%d" % (k % 7) * 300_000) for k in range(8)]
"""Lines that fill several frames."""


def packed(folder: Path, *steps: tuple[int, list[bytes]]) -> Path:
    path = folder / f"{steps[0][0]:08d}.jsonl.zst"
    path.write_bytes(b"".join(pack(step, lines) for step, lines in steps))
    return path


def read(folder: Path, step: int, *rows: int) -> list[bytes]:
    stored = stored_step(folder, step)
    assert stored is not None
    return [line + b"\n" for line in lines_of(stored, *rows)]


def test_packed_steps_are_read_back_line_by_line(tmp_path: Path) -> None:
    path = packed(tmp_path, (3, [b"{}\n"]), (4, WIDE), (5, []))
    assert list(stored_steps(tmp_path)) == [3, 4, 5]
    assert read(tmp_path, 3) == [b"{}\n"]
    assert read(tmp_path, 4) == WIDE
    assert read(tmp_path, 5) == []
    assert len(stored_steps(tmp_path)[4].frames) == 3
    assert path.stat().st_size < sum(map(len, WIDE)) / 100
    # Tools for Zstandard skip the descriptions.
    stream = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(path.read_bytes()), read_across_frames=True
    )
    assert stream.read() == b"{}\n" + b"".join(WIDE)


@given(start=st.integers(0, 9), stop=st.none() | st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_some_rows_are_read_without_unpacking_the_others(
    tmp_path_factory: pytest.TempPathFactory, start: int, stop: int | None
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    path = packed(folder, (4, WIDE))
    assert read(folder, 4, start, stop if stop is not None else 99) == WIDE[start:stop]
    last = stored_steps(folder)[4].frames[-1]
    with path.open("r+b") as file:  # reading the first row does not read the damaged last frame
        file.seek(last.offset)
        file.write(b"\0\0\0\0")
    assert read(folder, 4, 0, 1) == WIDE[:1]
    with pytest.raises(DataError, match="rows 6 to 7 of step 4"):
        read(folder, 4)


def test_a_partly_written_step_hides_no_other(tmp_path: Path) -> None:
    whole = pack(1, [b"1\n"])
    path = tmp_path / "00000001.jsonl.zst"
    both = whole + pack(2, WIDE)
    for size in [*range(len(whole), len(both), 97), len(both) - 1]:
        path.write_bytes(both[:size])
        assert list(stored_steps(tmp_path)) == [1], size
        assert scan(path).fault is None
        assert stored_step(tmp_path, 2) is None
    path.write_bytes(both)
    assert list(stored_steps(tmp_path)) == [1, 2]


def test_damage_is_named_and_hides_no_other_step(tmp_path: Path) -> None:
    contents = [pack(step, [b'{"step":%d}\n' % step]) for step in (1, 2, 3)]
    path = tmp_path / "00000001.jsonl.zst"
    start = len(contents[0])
    for at in range(start, start + len(contents[1])):
        content = bytearray(b"".join(contents))
        content[at] ^= 0x40
        path.write_bytes(content)
        found = stored_steps(tmp_path)
        assert {1, 3} <= set(found) <= {1, 2, 3}
        assert [*read(tmp_path, 1), *read(tmp_path, 3)] == [b'{"step":1}\n', b'{"step":3}\n']
        with pytest.raises(DataError, match=str(path)):
            read(tmp_path, 2)


def test_a_decompression_bomb_raises_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def framed(content: bytes, said: int, rows: int = 1) -> bytes:
        about = struct.pack("<4sQIIIIII", b"kpl1", 7, 0, rows, rows, said, len(content), zlib.crc32(content))
        head = struct.pack("<II", 0x184D2A5E, len(about) + 4)
        return head + about + struct.pack("<I", zlib.crc32(about)) + content

    bomb = zstandard.ZstdCompressor().compress(b"a" * 4_000_000 + b"\n")
    path = tmp_path / "00000007.jsonl.zst"
    path.write_bytes(framed(bomb, 4_000_001))
    assert len(read(tmp_path, 7)) == 1  # the same bytes are harmless where they are not too many
    monkeypatch.setattr(step_rows, "LARGEST", 1_000_000)
    with pytest.raises(DataError, match="would decompress to 4000001 bytes"):
        read(tmp_path, 7)
    newlines = zstandard.ZstdCompressor().compress(b"\n" * (FRAME + 1))
    path.write_bytes(framed(newlines, FRAME + 1, FRAME + 1))
    with pytest.raises(DataError, match="would decompress to 1048577 bytes"):
        read(tmp_path, 7)
    path.write_bytes(framed(bomb, 100))
    with pytest.raises(DataError, match="description"):
        read(tmp_path, 7)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    path.write_bytes(framed(unsaid.compress(b"a" * 4_000_000) + unsaid.flush(), 100))
    with pytest.raises(DataError, match="description"):
        read(tmp_path, 7)


def test_episodes_are_read_from_files(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.record_episodes(1, [group("a", 1, 2), group("b", 3)])
        run.record_episodes(2, [group("a", 4)])
    folder = run.path / "episodes" / "train"
    assert episode_steps(run.path) == [1, 2]
    assert read_groups(run.path, 1) == [group("a", 1, 2), group("b", 3)]
    assert [episode.seed for episode in read_episodes(run.path)] == [1, 2, 3, 4]
    with pytest.raises(RunDirectoryError, match="has no train episodes of step 3"):
        read_groups(run.path, 3)
    (path,) = folder.iterdir()
    path.write_bytes(b"\0" * 80 + pack(2, read(folder, 2)))
    assert episode_steps(run.path) == [2]
    for step in (None, 1):
        with pytest.raises(DataError, match="damaged at byte 0"):
            list(read_episodes(run.path, step))
