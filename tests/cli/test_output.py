from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from kapelle.runtime.console import printable


def test_control_characters_of_a_completion_are_escaped() -> None:
    assert printable("a\x1b[2Jb\rc\x00\x9b") == "a\\x1b[2Jb\\rc\\x00\\x9b"
    assert printable("safe\u202edesrever") == "safe\\u202edesrever"
    assert printable("\ud800") == "\\ud800"
    assert printable("two\nlines\tof text") == "two⏎lines of text"
    assert printable("47+85 → 132 ✓") == "47+85 → 132 ✓"


def recipes_into(output: int | IO[str]) -> subprocess.CompletedProcess[str]:
    """Run `kapelle recipes` in a process of its own, with that standard output."""
    program = "import sys; from kapelle.cli import main; sys.exit(main(['recipes']))"
    return subprocess.run(
        [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )


@pytest.mark.slow
def test_a_full_disk_behind_a_command_is_one_line_and_exit_code_2() -> None:
    with Path("/dev/full").open("w") as full:
        done = recipes_into(full)
    assert done.returncode == 2
    assert done.stderr.startswith("kapelle: The output cannot be written: No space left on device.")


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_without_output() -> None:
    read, write = os.pipe()
    os.close(read)
    done = recipes_into(write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
