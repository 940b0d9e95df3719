"""Programs get no huge pages that they did not ask for, and this process keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.environments.sandbox import bubblewrap as huge_pages
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.session import run


@pytest.mark.parametrize(
    ("enabled", "size", "unasked"),
    [
        ("always [madvise] never", "always inherit madvise [never]", False),
        ("[always] madvise never", "always inherit madvise [never]", True),
        ("always [madvise] never", "[always] inherit madvise never", True),
    ],
)
def test_the_settings_of_the_kernel_are_read(tmp_path: Path, enabled: str, size: str, unasked: bool) -> None:
    assert not huge_pages.given_unasked(tmp_path)
    (tmp_path / "hugepages-64kB").mkdir()
    (tmp_path / "enabled").write_text(enabled)
    (tmp_path / "hugepages-64kB" / "enabled").write_text(size)
    assert huge_pages.given_unasked(tmp_path) is unasked


def allowed(status: str) -> str:
    return next(line.split()[1] for line in status.splitlines() if line.startswith("THP_enabled:"))


def test_a_program_has_none_and_this_process_keeps_its_own(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path("/proc/self/status").read_text()
    if "THP_enabled:" not in before:
        pytest.skip("this kernel does not say who may have huge pages")
    monkeypatch.setattr(huge_pages, "given_unasked", lambda setting: True)
    inside = run(sandbox, {}, ["/bin/sh", "-c", "cat /proc/self/status"]).stdout.decode()
    assert allowed(inside) == "0"
    assert allowed(Path("/proc/self/status").read_text()) == allowed(before)
