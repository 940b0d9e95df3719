"""Runs whose agents write in a given form: legal moves alone, the same numbers wherever episode states live, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.features.ahead.test_queue import SMALL

from kapelle import Trainer
from kapelle.errors import ConfigError
from kapelle.rollout.evaluation.exploitability import language_table
from kapelle.runs.reader import read_groups
from kapelle.settings.base import Settings
from kapelle.setup.recipe import resolve
from kapelle.types import Constraint

MODEL = {
    "embedded": {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 32, "context": 512}
}


def poker(**sections: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "environment": {"name": "openspiel", "game": "kuhn_poker", "wording": "short"},
        "team": {"agents": 2, "sharing": "lora", "sampling": {"max_tokens": 8, "choices": "legal"}},
        "workflow": {"name": "play", "memory": "observation"},
        "algorithm": {
            "name": "grpo",
            "group_size": 4,
            "team_reward": "individual",
            "loss": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        },
        "training": {"steps": 2, "tasks_per_step": 2},
        "evaluation": {"problems": 4},
        **sections,
    }


def rows(settings: dict[str, Any], run: Path | None = None) -> list[dict[str, float]]:
    with Trainer(resolve(settings), run_dir=run) as trainer:
        return [
            {k: v for k, v in step.metrics.items() if not k.startswith("time")} for step in trainer.steps()
        ]


def test_an_untrained_model_makes_legal_moves_alone_and_training_reads_the_same_distribution(
    tmp_path: Path,
) -> None:
    with Trainer(resolve(poker()), run_dir=tmp_path / "run") as trainer:
        for step in trainer.steps():
            assert all(
                e.error is None and not any(e.info["invalid"].values())
                for g in step.groups
                for e in g.episodes
            )
            assert step.metrics["parity/max"] <= 1e-4
            if step.number == 1:
                assert step.metrics["kl/agent_0"] == pytest.approx(0.0, abs=1e-6), (
                    "the reference has the same masks"
                )
        exact = language_table(trainer.setup, trainer.engine.score)
        assert min(exact.legal.values()) > 0.999
    for group in read_groups(tmp_path / "run", 1):
        assert {turn.constraint for e in group.episodes for turn in e.turns} == {
            Constraint.choices(["Pass", "Bet"])
        }


def test_worlds_in_another_process_list_their_moves() -> None:
    here = rows(poker())
    assert rows(poker(episode={"environment_workers": 1})) == here


@pytest.mark.filterwarnings("ignore:.*were cut off after")
def test_what_is_sampled_in_parts_keeps_its_form() -> None:
    form = "[a-z]([a-z ]{0,30}\\.){1,4}"
    settings = {
        **SMALL,
        "team": {"agents": 2, "lora": {"rank": 2}, "sampling": {"max_tokens": 120, "regex": form}},
        "algorithm": {"name": "grpo", "group_size": 2, "loss": {"importance_cap": 2.0}},
        "training": {"steps": 4, "tasks_per_step": 4, "max_staleness": 2, "asynchronous": True},
    }
    with Trainer(resolve(settings)) as trainer:
        for step in trainer.steps():
            turns = [turn for group in step.groups for e in group.episodes for turn in e.turns]
            assert all(turn.constraint == Constraint.regex(form) for turn in turns)
            assert step.metrics.get("parity/max", 0.0) <= 1e-4


class Unsure(Settings):
    """An engine that does not say that it holds completions to a form."""

    name: str

    def build(self, *_: object) -> Any:
        raise AssertionError("refused before")


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer(resolve(poker(**changes)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def team(**sampling: Any) -> dict[str, Any]:
    return {"agents": 2, "sharing": "lora", "sampling": {"max_tokens": 8, **sampling}}


def test_what_nothing_can_hold_to_is_refused_before_a_model_loads() -> None:
    sums = {
        "environment": {"name": "arithmetic"},
        "workflow": {"name": "chain"},
        "algorithm": {"name": "grpo"},
    }
    assert "'arithmetic' lists none" in refused(**sums)
    game = {"name": "openspiel", "game": "kuhn_poker", "thinking": True}
    thought = refused(environment=game)
    assert "`environment.thinking: true`" in thought
    assert "Set `environment.thinking: false`." in thought
    mixed = refused(environment={"name": "mixture", "parts": {"kuhn": {"environment": game}}})
    assert "Set `environment.parts.kuhn.environment.thinking: false`" in mixed
    assert "Set `max_tokens: 11`" in refused(team=team(choices=["yes", "everything"]))
    assert "unclosed group" in refused(team=team(regex="(yes"))
    assert "exists. Set a higher `max_tokens`" in refused(team=team(regex="a{30}"))
    place = {"type": "object", "properties": {"place": {"enum": ["here"]}}, "required": ["place"]}
    assert "exists. Set a higher `max_tokens`" in refused(team=team(json_schema=place))
    assert "exists. Set a higher `max_tokens`" in refused(team=team(grammar='start: "nothing" "short"'))
    assert "`choices` and `regex` cannot" in refused(team=team(choices=["a"], regex="a"))
    assert "Put the string in quotes" in refused(
        team=yaml.safe_load("{agents: 2, sharing: lora, sampling: {choices: [yes, no]}}")
    )
    served = {"endpoint": "http://127.0.0.1:9/v1", "model": "m"}
    agents = [{"name": "a"}, {"name": "b", "weights": served}]
    assert "'b' is an endpoint" in refused(team={**team(choices="legal"), "agents": agents})
    assert "does not support the constraint" in refused(engine={"name": f"{__name__}:Unsure"})
