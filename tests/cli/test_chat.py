from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle, Said

from kapelle.cli.chat import _Turns
from kapelle.services.policy.teams import Spoken


def test_what_is_no_run_is_one_line(kapelle: Kapelle) -> None:
    for words, told in (([], "Name one run directory"), (["nowhere"], "nowhere")):
        said = kapelle("chat", *words)
        assert said.code == 2
        assert told in said.err


def test_turns_of_one_moment_are_printed_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    turns = _Turns()
    for agent, text, begins, ends in [
        ("a", "", True, False),
        ("b", "", True, False),
        ("a", "1", False, False),
        ("b", "x", False, False),
        ("b", "y", False, True),
        ("a", "2\x1b", False, True),
        ("a", "", True, False),
        ("a", "3", False, True),
    ]:
        turns.hear(Spoken(0, agent, text, begins, ends))
    assert capsys.readouterr().out == "a: 12\\x1b\nb: xy\na: 3\n"


@pytest.mark.slow
def test_a_team_is_talked_with(
    kapelle: Kapelle, finished: tuple[Path, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n\n/new\n2+2\n" + "9" * 500 + "\n"))
    said = kapelle("chat", str(run))
    assert said.code == 0
    spoke = [
        line.partition(": ")[0]
        for line in said.out.splitlines()
        if line.startswith(("reasoner", "actor", "team"))
    ]
    assert spoke == ["reasoner", "actor", "team"] * 2
    assert "tokens; its model reads 64" in said.err, (
        "a question that is too long is said to be, and the talk goes on"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n"))
    assert kapelle("chat", str(run), "--agent", "actor").out.startswith("actor: ")
    assert "Did you mean 'actor'" in kapelle("chat", str(run), "--agent", "acter").err
