"""The public interface is what was agreed on: a change of it is meant, seen in review and in the changelog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kapelle

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("public_api.txt")


@pytest.mark.slow
def test_the_public_interface_is_the_one_agreed_on() -> None:
    tool = ROOT / "tools" / "public_api.py"
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines(), (
        "The public interface changed. If that is meant: "
        "python tools/public_api.py > tests/repository/public_api.txt, and a line in CHANGELOG.md."
    )


def test_every_public_name_stands_in_the_snapshot_and_loads() -> None:
    snapshot = SNAPSHOT.read_text(encoding="utf-8")
    for name in kapelle.__all__:
        assert getattr(kapelle, name) is not None
        assert f"class {name}\n" in snapshot or any(
            line.startswith((f"class {name}(", f"{name}(", f"{name}:")) for line in snapshot.splitlines()
        )
