from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle, Said

from kapelle.cli.chat import _unless_stopped


@pytest.fixture
def _obeyed() -> Iterator[None]:
    """Have Ctrl-C obeyed, as a command has it, where the shell that started the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_obeyed")
def test_ctrl_c_breaks_an_answer_off_and_not_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    async def long() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)
        return "never"

    async def short() -> str:
        return "42"

    assert asyncio.run(_unless_stopped(long())) is None
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert asyncio.run(_unless_stopped(short())) == "42"


@pytest.mark.slow
def test_a_team_is_talked_with(
    kapelle: Kapelle, finished: tuple[Path, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("1+1\n\n/reset\n/what\n2+2\n" + "9" * 500 + "\n/quit\n3+3\n")
    )
    said = kapelle("chat", str(run))
    assert said.code == 0
    spoke = [
        line.partition(": ")[0]
        for line in said.out.splitlines()
        if line.startswith(("reasoner", "actor", "team"))
    ]
    assert spoke == ["reasoner", "actor", "team"] * 2
    assert "Unknown command /what: /reset starts over" in said.err
    assert re.search(r"tokens; its model reads.* 64\.", said.err), (
        "a question that is too long is said to be, and the talk goes on"
    )
    for called in ("actor", "team/actor"):
        monkeypatch.setattr("sys.stdin", io.StringIO("1+1\n"))
        assert kapelle("chat", str(run), "--agent", called).out.startswith("actor: ")
    assert "Did you mean 'actor'" in kapelle("chat", str(run), "--agent", "acter").err
