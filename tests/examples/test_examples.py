"""Run the examples and check what they print."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def main(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found: Callable[..., Any] = runpy.run_path(str(EXAMPLES / request.param))["main"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("main", ["train_a_team.py"], indirect=True)
def test_train_a_team(main: Callable[[int], float], capsys: pytest.CaptureFixture[str]) -> None:
    assert 0.0 <= main(2) <= 1.0
    assert re.search(r"played: \{'agent_0': '.*', 'agent_1': '.*'\}", capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("main", ["train_a_team.py"], indirect=True)
def test_a_team_learns(main: Callable[[int], float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(12) == 1.0
    assert "played: {'agent_0': 'A', 'agent_1': 'A'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "label"),
    [("own_environment.py", "reward"), ("own_questions.py", "reward"), ("summarise.py", "ROUGE-L")],
    indirect=["main"],
)
def test_own_environment(main: Callable[[int], None], label: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(2)
    assert capsys.readouterr().out.count(label) == 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("main", ["exploitability.py"], indirect=True)
def test_exploitability(main: Callable[..., float], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyspiel")
    small = (
        "warmup.steps=2",
        "training.tasks_per_step=2",
        "algorithm.group_size=2",
        "model.embedded.layers=1",
    )
    assert 0.0 <= main(2, 1, *small) <= 4.0
    printed = capsys.readouterr().out.splitlines()
    assert sum("NashConv" in line for line in printed) == 2
    assert sum("bets" in line for line in printed) == 12
