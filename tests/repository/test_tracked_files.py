"""What is committed belongs to the project alone: no machine's paths, no large or binary files, no notes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = re.compile(r"(?<![\w.])/(?:root|home/\w+|Users/\w+|work|mnt/\w+|opt/\w+)/[\w.-]+")
"""Absolute paths that exist on someone's machine only."""
LARGEST = 400_000
"""Bytes; data files and pictures of more are fetched or made, not committed."""


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: there is no list of tracked files")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def machine_paths(text: str) -> list[str]:
    own = [str(path) for path in (ROOT, Path.home()) if len(path.parts) > 2 and f"{path}/" in text]
    return own + HOMES.findall(text)


def test_no_file_names_a_path_of_one_machine(tracked: list[Path]) -> None:
    found = {
        str(path.relative_to(ROOT)): paths
        for path in tracked
        if path != Path(__file__)
        and (paths := machine_paths(path.read_text(encoding="utf-8", errors="ignore")))
    }
    assert found == {}


def test_nothing_large_is_committed(tracked: list[Path]) -> None:
    assert [str(path) for path in tracked if path.stat().st_size > LARGEST] == []
