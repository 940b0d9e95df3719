"""`kapelle view`; its pages are tested in `tests/viewer`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from kapelle.cli import main


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "There is no folder nowhere"),
        ([".", "--host", "0.0.0.0"], "needs TLS"),  # noqa: S104
        ([".", "--prot", "1"], "did you mean"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words]) == 2
    said = capsys.readouterr().err
    assert reason.lower() in said.lower()
    assert said.count("\n") == 1
