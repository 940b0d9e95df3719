"""The swap test: roles act with one another's weights, on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import SIZE, tiny_model

from kapelle.errors import ConfigError
from kapelle.models.checksums import CHECKSUMS
from kapelle.models.weights import save_model
from kapelle.rollout.evaluation.swap import compare_swap, swapped
from kapelle.setup.recipe import resolve
from kapelle.team import Endpoint
from kapelle.training.trainer import Trainer


def trainer(agents: Sequence[Any], **team: Any) -> Trainer:
    agents = [{"name": agent} if isinstance(agent, str) else agent for agent in agents]
    return Trainer(
        resolve(
            {
                "model": {"path": "embedded", "embedded": SIZE},
                "environment": {"name": "plan_path", "side": 3, "difficulty": [1, 3], "wording": "short"},
                "workflow": {"name": "play"},
                "algorithm": {"name": "at_grpo", "group_size": 2},
                "team": {"agents": agents, "sampling": {"max_tokens": 3}, **team},
                "training": {"steps": 1, "tasks_per_step": 2},
                "optimizer": {"lr": 0.1},
                "evaluation": {"problems": 3, "before_and_after": False},
            }
        )
    )


def test_three_adapters_move_one_role_on() -> None:
    with trainer("abc", sharing="lora") as team:
        changed, acts_with = swapped(team.setup)
        assert acts_with == {"a": "b", "b": "c", "c": "a"}
        assert dict(changed.team.policy_of) == {"a": "b", "b": "c", "c": "a"}
        assert [agent.name for agent in changed.team.agents] == ["a", "b", "c"]


def test_agents_with_the_same_weights_count_as_one() -> None:
    one = {"adapter": "one"}
    with trainer(
        [{"name": "a", "weights": one}, {"name": "b", "weights": one}, {"name": "c"}], sharing="lora"
    ) as team:
        changed, acts_with = swapped(team.setup)
        assert acts_with == {"a": "c", "b": "c", "c": "a"}
        assert dict(changed.team.policy_of) == {"a": "c", "b": "c", "c": "one"}


def test_separate_models_exchange_and_exchange_back() -> None:
    agents = [{"name": name, "weights": {"model": "embedded"}} for name in ("a", "b")]
    with trainer(agents) as team:
        for _ in team.steps():
            pass
        before = team.evaluate(problems=3)
        changed, _ = swapped(team.setup)
        again, _ = swapped(changed)
        assert again.team.policy_of == team.setup.team.policy_of
        assert changed.team.policy_of != again.team.policy_of
        first, *rest = before.groups
        solved = replace(first, episodes=tuple(replace(each, success=1.0) for each in first.episodes))
        swap = compare_swap(before, replace(before, groups=(solved, *rest)), {"a": "b", "b": "a"})
        # None of three problems is solved before, and one of them after: changes 1, 0, 0, and t = 4.303.
        assert swap.change == pytest.approx(1 / 3)
        assert swap.interval == pytest.approx((1 / 3 - 4.302653 / 3, 1 / 3 + 4.302653 / 3))


@pytest.mark.parametrize(("names", "sharing"), [("ab", "shared"), ("a", "lora")])
def test_a_team_with_one_set_of_weights_is_an_error(names: str, sharing: str) -> None:
    with trainer(names, sharing=sharing) as team, pytest.raises(ConfigError, match="have the same weights"):
        swapped(team.setup)


def test_an_endpoint_cannot_take_another_role() -> None:
    with trainer("ab", sharing="lora") as team:
        served = replace(
            team.setup.team.policies["b"], lora=None, trained=False, endpoint=Endpoint("http://x/v1", "x")
        )
        policies = {**team.setup.team.policies, "b": served}
        setup = replace(team.setup, team=replace(team.setup.team, policies=policies))
        with pytest.raises(ConfigError, match="'b' is served by an endpoint"):
            swapped(setup)


def test_models_with_different_prompts_cannot_exchange(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_model())
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text("utf-8").replace("<|end|>", "<|end|>\n"), "utf-8")
    (tmp_path / CHECKSUMS).unlink()
    agents = [{"name": "a"}, {"name": "b", "weights": {"model": str(tmp_path)}}]
    with trainer(agents) as team, pytest.raises(ConfigError, match="'a' and 'b' convert the same prompt"):
        swapped(team.setup)
