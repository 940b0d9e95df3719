"""The guard of the command's process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from kapelle.cli import main
from kapelle.runtime.process_tree import end_session


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["train", "demo", "--launch", "ray"]) == 2
    assert (
        capsys.readouterr().err
        == "kapelle: `--launch ray` needs Ray. Install it: pip install 'kapelle[ray]'\n"
    )


def test_a_session_ends_with_its_child_processes() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"up\n"
        end_session(one.pid)
        assert one.stdout.read() == b"", "whoever else held the pipe is gone"
        assert one.wait(30) == -9
