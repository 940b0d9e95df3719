"""Programs get no huge pages that they did not ask for, and this process keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.environments.sandbox import bubblewrap as huge_pages
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.session import run


def allowed(status: str) -> str:
    return next(line.split()[1] for line in status.splitlines() if line.startswith("THP_enabled:"))


def test_a_program_has_none_and_this_process_keeps_its_setting(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path("/proc/self/status").read_text()
    if "THP_enabled:" not in before:
        pytest.skip("this kernel does not say who may have huge pages")
    monkeypatch.setattr(huge_pages, "given_unasked", lambda setting: True)
    inside = run(sandbox, {}, ["/bin/sh", "-c", "cat /proc/self/status"]).stdout.decode()
    assert allowed(inside) == "0"
    assert allowed(Path("/proc/self/status").read_text()) == allowed(before)
