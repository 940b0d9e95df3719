"""`python -m kapelle` is `kapelle`."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kapelle", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kapelle.__main__", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kapelle ")
