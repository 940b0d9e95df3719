"""The examples run, and what they show is true."""

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
def test_a_team_trained_from_python_finds_the_best_joint_move(
    main: Callable[[int], float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(12) == 1.0
    assert "played: {'agent_0': 'A', 'agent_1': 'A'}" in capsys.readouterr().out


@pytest.mark.parametrize("main", ["own_environment.py", "own_questions.py"], indirect=True)
def test_an_environment_of_ones_own_is_trained_on(
    main: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    main(2)
    assert capsys.readouterr().out.count("reward") == 2


@pytest.mark.parametrize("main", ["summarise.py"], indirect=True)
def test_summaries_are_paid_by_their_likeness(
    main: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    main(2)
    assert capsys.readouterr().out.count("ROUGE-L") == 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("main", ["exploitability.py"], indirect=True)
def test_the_distance_from_an_equilibrium_is_printed_for_policies_and_their_average(
    main: Callable[..., float], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyspiel")
    small = (
        "warmup.steps=2",
        "training.tasks_per_step=2",
        "algorithm.group_size=2",
        "model.embedded.layers=1",
    )
    assert 0.0 <= main(2, 1, *small) <= 4.0
    said = capsys.readouterr().out.splitlines()
    assert sum("NashConv" in line for line in said) == 2
    assert sum("bets" in line for line in said) == 12
