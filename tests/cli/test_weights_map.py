from __future__ import annotations

from typing import Any

from tests.support.tiny import SIZE

from kapelle.cluster.planning.weights_map import WeightsMap, describe, weights_map
from kapelle.models.outline import read_outline
from kapelle.settings.schema import EmbeddedConfig
from kapelle.team import Agent, Critic, Endpoint, Lora, Policy, Team

MODEL = read_outline("embedded", EmbeddedConfig(**SIZE))
LORA = Lora(rank=1, targets=("q_proj",))  # two layers of 16 + 16: 64 parameters
ALL = MODEL.parameters


def mapped(policies: dict[str, Policy], of: dict[str, str], **more: Any) -> WeightsMap:
    team = Team(tuple(Agent(name) for name in of), policies, of, **more)
    return weights_map(team, dict.fromkeys(team.bases, MODEL))


TWO = {"a": Policy("a", lora=LORA), "b": Policy("b", lora=LORA)}


def test_each_policy_has_its_adapter() -> None:
    found = mapped(TWO, {"a": "a", "b": "b"})
    assert [(x.name, x.own_parameters, x.trained, x.agents) for x in found.learners] == [
        ("a", 64, True, ("a",)),
        ("b", 64, True, ("b",)),
    ]


def test_shared_weights_train_whole_and_name_all_their_agents() -> None:
    found = mapped({"shared": Policy("shared")}, {"a": "shared", "b": "shared"})
    (learner,) = found.learners
    assert (learner.weights, learner.own_parameters, learner.agents) == ("all of base", ALL, ("a", "b"))


def test_what_is_frozen_or_elsewhere_trains_nothing() -> None:
    policies = {
        "frozen": Policy("frozen", trained=False),
        "far": Policy("far", base="", trained=False, endpoint=Endpoint("http://host/v1", "gpt")),
    }
    found = mapped(policies, {"a": "frozen", "b": "far"})
    assert found.learners[1].weights == "gpt at http://host/v1"
    assert [line.split()[-2] for line in describe(found)[1:3]] == ["frozen", "frozen"]


def test_a_critic_is_an_adapter_and_a_head() -> None:
    found = mapped(
        TWO,
        {"a": "a", "b": "b"},
        critics={"critic": Critic("critic", lora=LORA)},
        critic_of={"a": "critic", "b": "critic"},
    )
    critic = found.learners[-1]
    assert (critic.kind, critic.own_parameters, critic.agents) == ("critic", 64 + 17, ("a", "b"))
