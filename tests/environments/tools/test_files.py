from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kapelle.environments.tools.contract import ToolFault
from kapelle.environments.tools.files import Files, Folder
from kapelle.errors import DataError

OUTSIDE = "the secret outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside.txt").write_text(OUTSIDE)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text(OUTSIDE)
    folder = tmp_path / "root"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "inner_link").symlink_to("notes/a.txt")
    os.mkfifo(folder / "pipe")
    return folder


def folder_of(root: Path, *, write: bool = False, files: int = 5) -> Folder:
    return Files(root=str(root), write=write, files=files).open()


def test_files_are_listed_and_read(root: Path) -> None:
    folder = folder_of(root)
    assert folder.list_files({}) == "inner_link\nlink.txt\nlinked\nnotes/\npipe"
    assert folder.list_files({"folder": "notes/"}) == "a.txt"
    assert folder.read_file({"path": "./notes//a.txt"}) == "one\ntwo\nthree\n"
    assert folder.read_file({"path": "notes/a.txt", "from_line": 3}) == "three\n"
    assert [tool.schema.name for tool in folder.tools] == ["list_files", "read_file"]


@pytest.mark.parametrize(
    "path",
    [
        "../outside.txt",
        "notes/../../outside.txt",
        "/etc/passwd",
        "link.txt",
        "inner_link",
        "linked/a.txt",
        "linked/../../outside.txt",
        "pipe",
        "notes",
        "no/such",
        "notes/a.txt/deeper",
        "a\0b",
        "x" * 300,
        "",
        ".",
    ],
)
def test_only_files_beneath_the_root_are_read(root: Path, path: str) -> None:
    for write in (False, True):
        folder = folder_of(root, write=write)
        with pytest.raises(ToolFault) as fault:
            folder.read_file({"path": path})
        assert OUTSIDE not in str(fault.value)
        folder.close()


@pytest.mark.parametrize("path", ["../new", "/new", "link.txt", "linked/new", "inner_link", "notes", ""])
def test_nothing_outside_is_written(root: Path, path: str) -> None:
    folder = folder_of(root, write=True)
    with pytest.raises(ToolFault):
        folder.write_file({"path": path, "text": "overwritten"})
    folder.close()
    assert (root.parent / "outside.txt").read_text() == OUTSIDE
    assert sorted(path.name for path in (root.parent / "elsewhere").iterdir()) == ["a.txt"]
    assert (root / "notes" / "a.txt").read_text() == "one\ntwo\nthree\n"


@pytest.mark.parametrize("moment", ["notes", "a.txt"])
def test_a_link_that_appears_during_a_call_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """`notes` becomes a link to a folder outside just before a part of the path is opened."""
    opened = os.open

    def turn_then_open(name: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if name == moment:
            (root / "notes").rename(root / "away")
            (root / "notes").symlink_to(root.parent / "elsewhere")
        return opened(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", turn_then_open)
    folder = folder_of(root)
    if moment == "notes":
        with pytest.raises(ToolFault, match="cannot be opened"):
            folder.read_file({"path": "notes/a.txt"})
    else:
        # The folder is open already, so the file in it is read.
        assert folder.read_file({"path": "notes/a.txt"}) == "one\ntwo\nthree\n"
    assert (root / "notes").is_symlink()


def test_files_are_written_to_a_copy_within_limits(root: Path) -> None:
    folder = folder_of(root, write=True, files=2)
    assert folder.write_file({"path": "new/deep/b.txt", "text": "für"}) == "Wrote 4 bytes to new/deep/b.txt."
    assert folder.read_file({"path": "new/deep/b.txt"}) == "für"
    with pytest.raises(ToolFault, match="1,048,576"):
        folder.write_file({"path": "large", "text": "x" * (1 << 20) + "x"})
    folder.write_file({"path": "notes/a.txt", "text": "changed"})
    with pytest.raises(ToolFault, match="No more files"):
        folder.write_file({"path": "c.txt", "text": ""})
    assert not (root / "new").exists()
    folder.close()
    folder.close()


def test_a_path_has_at_most_32_parts_and_the_copy_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = folder_of(root, write=True)
    for tool in (folder.write_file, folder.read_file):
        with pytest.raises(ToolFault, match="3,001 steps"):
            tool({"path": "d/" * 3000 + "x", "text": "y"})
    folder.write_file({"path": "d/" * 31 + "x", "text": "y"})
    assert list((tmp_path / "temporary").iterdir())
    folder.close()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_long_files_and_folders_are_read_in_parts(root: Path) -> None:
    (root / "long.txt").write_text("".join(f"line {k}\n" for k in range(1, 5001)))
    for k in range(300):
        (root / "notes" / f"n{k:03}").touch()
    folder = folder_of(root)
    part = folder.read_file({"path": "long.txt"})
    following = int(part.rpartition(" ")[2])
    assert part.splitlines()[-2] == f"line {following - 1}"
    assert folder.read_file({"path": "long.txt", "from_line": following}).startswith(f"line {following}\n")
    assert folder.list_files({"folder": "notes"}).endswith("… and 101 more")


def test_a_missing_folder_is_rejected() -> None:
    with pytest.raises(DataError, match="nowhere"):
        Files(root="nowhere").check()


def test_each_episode_begins_with_the_texts_of_its_notes() -> None:
    settings = Files(write=True, texts={"shop/list.txt": "milk\n"})
    settings.check()
    one, other = settings.open(), settings.open()
    assert one.read_file({"path": "shop/list.txt"}) == "milk\n"
    one.write_file({"path": "b.txt", "text": "hello"})
    assert one.state() == {"b.txt": "hello", "shop/list.txt": "milk\n"}
    assert other.state() == {"shop/list.txt": "milk\n"}
    empty = Files(write=True).open()
    assert empty.list_files({}) == "(empty)"
    assert empty.state() == {}
    for folder in (one, other, empty):
        folder.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "root"),
        ({"root": "a", "write": True, "texts": {"a": "b"}}, "texts"),
        ({"write": True, "texts": {"../a": "b"}}, "beneath the folder"),
        ({"write": True, "texts": {"": "b"}}, "not a file"),
        ({"write": True, "texts": {"a": "b", "a/b": "c"}}, "`texts.a`"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Files(**settings)
