"""The team map: which agent acts with which weights, and who judges it."""

from __future__ import annotations

from typing import Any

import pytest

from kapelle.errors import ConfigError
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import resolve
from kapelle.setup.team_builder import build_team
from kapelle.team import Lora, Rate, Team


def config(agents: Any, algorithm: Any = "grpo", **team: Any) -> RunConfig:
    return resolve(
        {
            "environment": {"name": "arithmetic"},
            "workflow": {"name": "chain"},
            "algorithm": {"name": algorithm} if isinstance(algorithm, str) else algorithm,
            "team": {"agents": agents, **team},
        }
    )


def build(agents: Any, algorithm: Any = "grpo", **team: Any) -> Team:
    settings = config(agents, algorithm, **team)
    return build_team(settings, settings.algorithm.build())


def seats(*names: str, **fields: Any) -> list[dict[str, Any]]:
    """Agents by name; a keyword gives further fields of the agent of that name."""
    return [{"name": name, **fields.get(name, {})} for name in names]


class TestWeights:
    def test_a_number_makes_agents_alike_with_an_adapter_each(self) -> None:
        team = build(3)
        assert team.names == ("agent_0", "agent_1", "agent_2")
        assert team.trained == team.names
        assert all(policy.lora == Lora() and policy.base == "base" for policy in team.policies.values())
        assert team.bases == {"base": "embedded"}

    def test_agents_may_have_different_kinds_of_weights(self) -> None:
        fields = {
            "a": {"lora": {"rank": 3}},
            "b": {"weights": "frozen"},
            "c": {"weights": {"model": "some/model"}},
            "d": {"weights": {"model": "other/model", "train": "lora"}},
            "e": {"weights": {"model": "other/model", "train": "none"}},
            "f": {"weights": {"adapter": "both"}},
            "g": {"weights": {"adapter": "both"}},
            "h": {"weights": {"endpoint": "http://localhost:1/v1", "model": "remote"}},
        }
        team = build(seats(*fields, **fields))
        assert team.trained == ("a", "c", "d", "both")
        assert team.policy("a").lora == Lora(rank=3)
        assert team.policy_of["f"] == team.policy_of["g"] == "both"
        assert team.bases[team.policy("c").base] == "some/model"
        assert team.policy("d").base == team.policy("e").base
        assert (team.policy("e").lora, team.policy("e").trained) == (None, False)
        assert team.policy("h").endpoint is not None
        assert not team.policy("h").trained

    @pytest.mark.parametrize("name", ["base", "shared", "frozen", "critic", "own", "reference"])
    def test_no_name_of_an_agent_means_anything_else(self, name: str) -> None:
        team = build(seats("other", name, **{name: {"weights": {"model": "some/model"}}}))
        assert team.bases["base"] == "embedded"
        assert team.bases[team.policy("other").base] == "embedded"
        assert team.bases[team.policy(name).base] == "some/model"
        plain = build(seats("other", name), "mappo")
        assert not {*plain.policies} & {*plain.critics}

    def test_what_shares_an_adapter_has_one_size_of_it(self) -> None:
        fields = {"a": {"weights": {"adapter": "x"}}, "b": {"weights": {"adapter": "x"}, "lora": {"rank": 2}}}
        with pytest.raises(ConfigError, match="The settings of agent 'b' for policy 'x' differ"):
            build(seats("a", "b", **fields))

    def test_an_adapter_on_a_base_that_trains_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="same base weights"):
            build(seats("a", "b", b={"weights": "shared"}))

    @pytest.mark.parametrize("name", ["a.b", "a/b", "1a", "", "a b"])
    def test_invalid_names_of_agents_are_errors(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"team\.agents.*name"):
            config([{"name": name}])
        with pytest.raises(ConfigError, match="adapter"):
            config([{"name": "a", "weights": {"adapter": name}}])


class TestCritics:
    def test_a_central_critic_is_one_for_all(self) -> None:
        team = build(seats("a", "b", "c"), "mappo")
        assert len(team.critics) == 1
        assert len(set(team.critic_of.values())) == 1

    @pytest.mark.parametrize("whose", ["a", 0])
    def test_an_agent_shares_a_critic_by_name_or_index(self, whose: str | int) -> None:
        team = build(seats("a", "b", "c", c={"share_critic_with": whose}), "ippo")
        assert team.critic_of == {"a": "critic:a", "b": "critic:b", "c": "critic:a"}
        assert list(team.critics) == ["critic:a", "critic:b"]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"a": {"share_critic_with": "a"}}, "leads back to the same agent"),
            ({"a": {"share_critic_with": 1}, "b": {"share_critic_with": 0}}, "leads back to the same agent"),
            ({"a": {"share_critic_with": 3}}, "from 0 to 2"),
            ({"a": {"share_critic_with": "bb"}}, "the unknown agent 'bb'.*Did you mean 'b'|Known: a, b, c"),
        ],
    )
    @pytest.mark.parametrize("algorithm", ["ippo", "mappo"])
    def test_circular_sharing_of_critics_is_an_error(
        self, fields: dict[str, Any], message: str, algorithm: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            build(seats("a", "b", "c", **fields), algorithm)

    def test_critics_of_an_algorithm_without_critics_are_an_error(self) -> None:
        with pytest.raises(ConfigError, match="`grpo` has no critics"):
            build(seats("a", "b", b={"share_critic_with": 0}), "grpo")

    def test_agents_that_do_not_learn_have_none(self) -> None:
        team = build(seats("a", "b", b={"weights": "frozen"}), "ippo")
        assert team.critic_of == {"a": "critic:a"}

    def test_the_critic_of_a_whole_model_uses_a_copy(self) -> None:
        team = build(2, "ippo", sharing="shared")
        bases = {critic.base for critic in team.critics.values()}
        assert bases == {"base@critic"}
        assert team.bases == {"base": "embedded", "base@critic": "embedded"}


class TestRates:
    def test_an_agents_own_is_that_of_its_weights_and_of_its_critic(self) -> None:
        own = {"lr": 3e-6, "critic_lr": 1e-4, "schedule": "cosine"}
        team = build(seats("a", "b", a={"optimizer": own}), "ippo")
        assert {name: policy.rate for name, policy in team.policies.items()} == {
            "a": Rate(3e-6, "cosine"),
            "b": Rate(),
        }
        assert {name: critic.rate for name, critic in team.critics.items()} == {
            "critic:a": Rate(1e-4, "cosine"),
            "critic:b": Rate(),
        }

    @pytest.mark.parametrize(
        "weights",
        ["frozen", {"model": "some/model", "train": "none"}, {"endpoint": "http://x", "model": "m"}],
    )
    def test_what_does_not_train_has_none(self, weights: Any) -> None:
        with pytest.raises(
            ConfigError,
            match="`optimizer` of agent 'a' sets a learning rate, but the agent's weights are not trained",
        ):
            build(seats("a", "b", a={"weights": weights, "optimizer": {"lr": 1e-3}}))

    def test_agents_that_share_weights_share_their_rate(self) -> None:
        listed = seats("a", "b", a={"optimizer": {"lr": 1e-3}})
        with pytest.raises(ConfigError, match="Set the same `lora` and `optimizer`"):
            build(listed, sharing="shared")
