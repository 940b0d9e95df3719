"""`python -m kapelle` is `kapelle`."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_is_the_command() -> None:
    # In a process of its own, which the command ends where something was left behind.
    ended = subprocess.run(
        [sys.executable, "-m", "kapelle", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("kapelle ")
