"""What theory says of small games, and that learning gets there: seeded, from a tiny model that knows legal moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kapelle.rows import Sample
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

GAME: dict[str, Any] = {
    "model": {
        "embedded": {
            "hidden": 32,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "intermediate": 64,
            "context": 96,
        }
    },
    "workflow": {"name": "play"},
    "warmup": {"steps": 120, "demonstrations": 200, "batch": 32},
    "training": {"steps": 50, "tasks_per_step": 4},
    "evaluation": {"problems": 20, "before_and_after": False},
}
# Nothing that a player reads says which of the two it is.
TWINS = [{"name": "first", "prompt": "AB"}, {"name": "second", "prompt": "AB"}]
LORA = {"rank": 4, "alpha": 8.0}
TERMINATE = {"truncated": "terminate"}
"""A move that ran into its limit of tokens is a move: the game is over, and has no value beyond."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KAPELLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def trained(**sections: Any) -> Trainer:
    trainer = Trainer(resolve({**GAME, **sections}))
    for _ in trainer.steps():
        pass
    return trainer


def chances(trainer: Trainer, letters: str) -> dict[str, dict[str, float]]:
    """Return each agent's probability of saying each letter and nothing after it, exactly."""
    [group] = trainer.evaluate(problems=1).groups
    renderer = trainer.models["base"].renderer
    found: dict[str, dict[str, float]] = {}
    for turn in group.episodes[0].turns:
        found[turn.agent] = {}
        for letter in letters:
            said = renderer.completion(letter)
            tokens = (*turn.prompt_ids, *said)
            targets = tuple(range(len(turn.prompt_ids), len(tokens)))
            [logp_T] = trainer.engine.score([Sample(turn.policy, tokens, targets, {})])
            found[turn.agent][letter] = float(logp_T.sum().exp())
    return found


def differ(said: Mapping[str, Mapping[str, float]]) -> float:
    """Return the exact probability that both make a legal move and the two differ."""
    one, other = said["first"], said["second"]
    return one["A"] * other["B"] + one["B"] * other["A"]


def xor(sharing: str, lr: float, algorithm: Mapping[str, Any], steps: int) -> Trainer:
    return trained(
        environment={"name": "matrix", "game": "xor", "rules": "none"},
        training={"steps": steps, "tasks_per_step": 4},
        team={"sharing": sharing, "lora": LORA, "sampling": {"max_tokens": 2}, "agents": TWINS},
        algorithm={"group_size": 16, **algorithm},
        optimizer={"lr": lr},
    )


class TestXor:
    """2206.07505, section 4: two players that read the same must say different things."""

    @pytest.mark.long
    @pytest.mark.slow
    def test_one_set_of_weights_wins_half_of_the_time_at_most(self) -> None:
        with xor("shared", 1e-3, {"name": "grpo"}, steps=50) as trainer:
            said = chances(trainer, "AB")
            assert said["first"] == pytest.approx(said["second"], abs=1e-6)
            assert sum(said["first"].values()) > 0.8, "it does know the moves"
            assert differ(said) <= 0.5
            assert trainer.evaluate(greedy=True).success == 0.0

    @pytest.mark.long
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "algorithm",
        [
            {"name": "grpo"},
            {"name": "ippo", "gae": TERMINATE, "group_size": 8},
            {"name": "at_grpo", "tree": True},
            {"name": "magrpo", "tree": True, "joint": "cross", "group_size": 4},
        ],
        ids=lambda a: a["name"],
    )
    def test_an_adapter_each_wins_always(self, algorithm: Mapping[str, Any]) -> None:
        with xor("lora", 3e-3, algorithm, steps=50) as trainer:
            assert differ(chances(trainer, "AB")) > 0.8
            assert trainer.evaluate(greedy=True).success == 1.0


@pytest.mark.long
def test_optimism_finds_the_optimum_of_the_climbing_game() -> None:
    """Claus and Boutilier 1998: 11 beside losses of 30. Mean returns lead to 7 or less (docs/algorithms/README.md)."""
    with trained(
        environment={"name": "matrix", "game": "climbing", "rules": "none"},
        team={"lora": LORA, "sampling": {"max_tokens": 2}, "agents": [{"name": "first"}, {"name": "second"}]},
        algorithm={"name": "optimistic", "group_size": 16},
        optimizer={"lr": 3e-3},
    ) as trainer:
        assert trainer.evaluate(greedy=True).success == 1.0
        assert all(said["A"] > 0.6 for said in chances(trainer, "ABC").values())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce_plus_plus", "group_size": 8},
        {"name": "rloo", "group_size": 8},
        {"name": "remax", "group_size": 8},
        {"name": "ppo", "group_size": 8, "gae": TERMINATE},
        {"name": "a2c", "group_size": 8, "gae": {**TERMINATE, "lam": 1.0, "normalise": "policy"}},
        {"name": "grpo", "group_size": 8, "scale": "mean"},
        {"name": "grpo", "group_size": 8, "epochs": 2, "loss": {"kind": "dppo"}},
    ],
    ids=lambda a: a["name"],
)
def test_one_agent_finds_the_letter_that_pays(algorithm: Mapping[str, Any]) -> None:
    payoffs = {"A": 0.0, "B": 0.3, "C": 1.0}
    with trained(
        environment={"name": "matrix", "game": "custom", "payoffs": payoffs, "rules": "none"},
        team={"lora": LORA, "sampling": {"max_tokens": 2}, "agents": [{"name": "solver"}]},
        algorithm=algorithm,
        optimizer={"lr": 3e-3},
        training={"steps": 25, "tasks_per_step": 4},
    ) as trainer:
        said = chances(trainer, "ABC")["solver"]
        assert said["C"] > 0.8
        assert trainer.evaluate(greedy=True).success == 1.0
