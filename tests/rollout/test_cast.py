"""A task's cast: other policies, or the environment's own players, on the seats of the team's agents."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.tiny import LORA

pytest.importorskip("pyspiel")

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.wire.worlds import task_form, task_from
from kapelle.team import Agent, Policy, Team
from kapelle.types import Cast, Group, Task
from kapelle.workflows.play import PlayWorkflow

KUHN = OpenSpiel(game="kuhn_poker", wording="short")
POLICIES = {
    "bold": Policy("bold", lora=LORA),
    "shy": Policy("shy", lora=LORA),
    "old": Policy("old", lora=LORA, trained=False),
}


def played(task: Task, games: int = 4) -> Group:
    agents = (Agent("first"), Agent("second"))
    team = Team(agents, POLICIES, {"first": "bold", "second": "shy"})
    says = {"bold": "Bet", "shy": "Pass", "old": "Bet"}
    engine = ScriptedEngine({name: lambda request, says=says[name]: says for name in POLICIES})  # type: ignore[misc]
    setup = RolloutSetup(team, KUHN, PlayWorkflow(), engine)
    return run_async(lambda: rollout(setup, [task], games, seed=0))[0]


def test_the_cast_policy_speaks_for_the_agent_and_only_the_learner_is_trained_on() -> None:
    task = replace(KUHN.task("train", 0), cast={"second": Cast("old", "self@10")})
    for episode in played(task).valid:
        assert {(turn.agent, turn.policy, turn.trained) for turn in episode.turns} == {
            ("first", "bold", True),
            ("second", "old", False),
        }


def test_a_player_of_the_environment_has_the_seat_and_the_agent_is_paid_for_it() -> None:
    task = replace(KUHN.task("train", 0), cast={"second": Cast("", "nash")})
    for episode in played(task, 8).valid:
        assert {turn.agent for turn in episode.turns} == {"first"}
        assert episode.info["opponents"] == {"2": "nash"}
        assert episode.rewards["second"] == -episode.rewards["first"] != 0


def test_without_a_cast_all_is_as_the_team_map_says() -> None:
    policies = {turn.policy for episode in played(KUHN.task("train", 0)).valid for turn in episode.turns}
    assert policies == {"bold", "shy"}


def test_a_cast_survives_the_record_and_the_way_to_a_worker() -> None:
    task = replace(KUHN.task("train", 0), cast={"first": Cast("old", "self@10"), "second": Cast("", "mcts")})
    group = played(replace(task, cast={"first": Cast("old", "self@10")}))
    rows = [json.loads(line) for line in dump_groups(3, [group]).splitlines()]
    assert load_groups(rows)[0].task == group.task
    assert task_from(json.loads(json.dumps(task_form(task)))) == task
