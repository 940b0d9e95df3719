"""Best responses that training finds, against those that enumeration knows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from kapelle.errors import ConfigError
from kapelle.rollout.evaluation.exploitability import best_response, evaluate_table, language_table
from kapelle.training.best_response import Exploited, Found, exploit
from kapelle.training.trainer import Trainer

TINY = ["model.embedded.hidden=32", "model.embedded.layers=1", "model.embedded.intermediate=64"]
SMALL = [
    "warmup.steps=150",
    "warmup.demonstrations=300",
    "training.steps=1",
    "training.tasks_per_step=2",
    "evaluation.problems=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "kuhn"
    with Trainer.from_recipe("kuhn", *TINY, *SMALL, run_dir=folder) as trainer:
        trainer.train()
    return folder


@pytest.mark.long
def test_a_response_is_found_within_what_is_possible_and_the_run_is_left_alone(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Trainer.from_run(trained) as trainer:
        game = trainer.setup.environment
        table = language_table(trainer.setup, trainer.engine.score)
    own = evaluate_table(game, table).returns
    most = [best_response(game, table, seat)[0] for seat in (0, 1)]
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    games = 300
    found = exploit(str(trained), "optimizer.lr=3e-3", steps=25, games=games)
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    assert [each.agent for each in found.found] == ["first", "second"]
    noise = 2 / math.sqrt(games)  # at most 2 chips are won or lost
    for seat, each in enumerate(found.found):
        assert each.before == pytest.approx(own[seat], abs=4 * noise), "it begins as the run left it"
        assert each.after <= most[seat] + 4 * noise, "nobody gains more than the best response"
        assert len(each.curve) == each.steps == 25
        assert each.episodes == 25 * 16 * 8
        assert each.interval is not None
        assert each.interval[0] < each.gain < each.interval[1]
        assert each.at_least == pytest.approx(max(0.0, each.interval[0])), (
            "of two agents each bound fails in 1 of 40"
        )
    assert found.nash_conv_at_least > 0.3 * evaluate_table(game, table).nash_conv, "and much of it is found"
    row = json.loads(json.dumps(found.row()))
    assert row["nash_conv_found"] == pytest.approx(sum(max(0.0, each["gain"]) for each in row["agents"]))
    assert row["nash_conv_at_least"] == pytest.approx(sum(each["at_least"] for each in row["agents"]))
    assert row["nash_conv_at_least"] < row["nash_conv_found"]


@pytest.mark.slow
def test_only_the_agent_learns_and_its_gain_is_taken_game_by_game(tmp_path: Path) -> None:
    """Both are paid 1 if the second says B: in the same games the first gains nothing, and the second something in each of few."""
    payoffs = {"AA": 0.0, "BA": 0.0, "AB": 1.0, "BB": 1.0}
    settings: dict[str, Any] = {
        "model": {"embedded": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}},
        "team": {"agents": 2, "sampling": {"max_tokens": 2, "choices": "legal"}},
        "environment": {"name": "matrix", "game": "custom", "payoffs": payoffs},
        "workflow": {"name": "play"},
        "algorithm": {"name": "grpo", "group_size": 2},
        "training": {"steps": 1, "tasks_per_step": 1},
        "evaluation": {"before_and_after": False},
    }
    with Trainer(**settings, run_dir=tmp_path / "run") as trainer:
        trainer.train()
    first, second = exploit(str(tmp_path / "run"), "optimizer.lr=1e-1", steps=2, games=40).found
    assert 0.0 < first.before < 1.0
    assert (first.gain, first.interval) == (0.0, (0.0, 0.0))
    assert second.interval is not None
    assert 0.0 < second.interval[0] < second.gain == second.after - second.before
    # Of two agents each bound fails in 1 of 40, as the lower end of a 95 % interval does.
    assert second.at_least == pytest.approx(second.interval[0])


@pytest.mark.slow
def test_an_agent_that_is_not_there_is_answered_with_those_that_are(trained: Path) -> None:
    with pytest.raises(ConfigError, match="no agent 'third'; it has first, second"):
        exploit(str(trained), agents=["third"])


def test_losses_count_as_no_gain() -> None:
    found = [Found(name, 0.0, after, None, 0.0, 1, 8, [0.0]) for name, after in (("a", 0.5), ("b", -0.25))]
    assert Exploited("run", 10, found).nash_conv_found == 0.5
    assert Exploited("run", 10, found).nash_conv_at_least == 0.0, "of one game nothing is sure"
