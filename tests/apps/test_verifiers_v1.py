"""Environments of the real package verifiers 0.4, whose roles are the agents of a team (`make test-apps`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.serving import Reciting

from kapelle.engines.rollout.protocol import Request
from kapelle.environments.adapters.verifiers_v1 import VerifiersV1
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode
from kapelle.workflows.external import ExternalWorkflow

PYTHON = os.environ.get("KAPELLE_VERIFIERS_PYTHON", "")
"""An interpreter with verifiers 0.4; `tools/apps_environment.py` makes it."""
TRAIN = 35
"""The number of the 40 tasks of `vf_duo` that a hash of their content puts into the train split."""
pytestmark = [
    pytest.mark.apps,
    pytest.mark.skipif(not PYTHON, reason="needs KAPELLE_VERIFIERS_PYTHON, see tools/apps_environment.py"),
]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def duo(**settings: Any) -> VerifiersV1:
    return VerifiersV1.model_validate({"id": "vf-duo", "python": PYTHON, **settings})


def play(environment: VerifiersV1, said: Mapping[str, Sequence[str]], count: int = 1) -> list[Episode]:
    """Roll out the first train task; each agent says its lines in turn."""

    def say(request: Request) -> str:
        lines = said[request.policy]
        return lines[min(sum(message.role == "assistant" for message in request.messages), len(lines) - 1)]

    environment.check(list(said))
    team = Team(
        tuple(map(Agent, said)),
        {name: Policy(name, base="", trained=False) for name in said},
        {name: name for name in said},
    )
    setup = RolloutSetup(team, environment, ExternalWorkflow(), Reciting(say))
    with environment.serve(setup, lambda _name, _line: None):
        [group] = run_async(lambda: rollout(setup, [environment.task("train", 0)], count, 0))
    return list(group.episodes)


def test_each_role_is_an_agent_and_each_call_a_turn_with_its_tokens() -> None:
    environment = duo()
    answer = environment._taskset.rows["train"][0]["data"]["answer"]
    for episode in play(environment, {"solver": ["x", answer], "checker": ["no"]}, count=2):
        assert episode.error is None
        assert [(turn.agent, turn.text) for turn in episode.turns] == [
            ("solver", "x"),
            ("checker", "no"),
            ("solver", answer),
        ]
        first, _, third = episode.turns
        known = (*first.prompt_ids, *first.completion_ids)
        assert tuple(third.prompt_ids[: len(known)]) == known, "the sampled tokens are read again"
        assert episode.rewards == {"solver": 1.0, "checker": 0.5}
        assert episode.success == 0.75
        assert episode.info["right"] == {"solver": 1.0}
        assert episode.info["helped"] == {"checker": 0.5}
        assert episode.info["length"] == {"solver": float(len(answer))}


def test_an_error_in_the_environment_fails_its_episode() -> None:
    (episode,) = play(duo(args={"fault": True}), {"solver": ["x"], "checker": ["ok"]})
    assert episode.error is not None
    assert "no such column" in episode.error


def test_environments_of_the_package_play_any_taskset() -> None:
    answer = duo()._taskset.rows["train"][0]["data"]["answer"]
    (episode,) = play(duo(args={"id": "best-of-n", "n": 3}), {"solo": [answer]})
    assert [turn.agent for turn in episode.turns] == ["solo"] * 3, "the only agent plays the only role"
    assert (episode.rewards, episode.success) == ({"solo": 1.0}, 1.0)
    assert (episode.info["runs"], episode.info["pass_at_n"]) == (3.0, 1.0)
    talk = duo(args={"id": "user-sim"})
    assert "user (not trained there" in talk.sources["train"]
    (episode,) = play(talk, {"assistant": [answer], "user": ["What is it?", "###DONE###"]})
    assert [turn.agent for turn in episode.turns] == ["user", "assistant", "user"]
    assert episode.rewards["assistant"] == 1.0


def test_tasks_are_split_by_their_content_or_by_settings() -> None:
    environment = duo()
    assert (environment.size("train"), environment.size("test")) == (TRAIN, 40 - TRAIN), "a hash decides"
    apart = duo(evaluation={"first": 35, "count": 10})
    assert (apart.size("train"), apart.size("test")) == (35, 10)
    assert apart.skipped() == {"train": "5 tasks, which are also evaluation tasks"}
    assert environment.sources["train"].startswith("v1 environment of verifiers 0.4")


def test_what_does_not_fit_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="roles of verifiers' 'vf-duo' are solver, checker"):
        duo().check(["solver", "critic"])
    with pytest.raises(ConfigError, match="without a sandbox"):
        duo(args={"solver": {"harness": {"id": "bash"}}}).check(["solver", "checker"])
    with pytest.raises(ConfigError, match="no-such-taskset"):
        duo(id="no-such-taskset").check(["a"])
    with pytest.raises(
        ConfigError, match=r"The package verifiers is not installed there|has no v1 environments"
    ):
        duo(python=sys.executable).check(["a"])
