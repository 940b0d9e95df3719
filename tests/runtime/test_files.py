import errno
import os
from pathlib import Path

import pytest

from kapelle.runtime.files import explain, replace_file, write_all, write_new


def test_write_all_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    write_all(descriptor, b"0123456789")
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_write_new_never_overwrites(tmp_path: Path) -> None:
    write_new(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "file", b"old")

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_replacement_leaves_nothing_beside_it(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")
    replace_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "fault"),
        (errno.EACCES, "permission denied"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_the_reason_of_a_refusal_is_said_in_words(number: int, words: str) -> None:
    assert words in explain(OSError(number, os.strerror(number)))
