"""Weights by turn: an agent's k-th turn is sampled, trained, kept and resumed with the k-th adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.resumed import resumed
from tests.support.tiny import frozen_copy, learners_of, same_bits, sections, stir
from torch import Tensor

from kapelle.errors import TrainingHalted
from kapelle.models.weights import weights_hash
from kapelle.rows import turns_of
from kapelle.runs.reader import read_episodes, read_metrics
from kapelle.training.trainer import Trainer

OWN = {"per_turn": 2}


def run_of(first: Any = OWN, second: Any = OWN, rounds: int = 2, **over: Any) -> Trainer:
    """Return a debate of two agents with these weights; every adapter is far from where it began."""
    given = sections(**{"workflow": {"name": "debate", "rounds": rounds}, **over})
    agents = [{"name": "ada", "weights": first}, {"name": "ben", "weights": second}]
    given["team"] = {**given["team"], "agents": agents}
    trainer = Trainer(**given)
    for seed, policy in enumerate(trainer.team.trained):
        stir(trainer.engine.weights(policy), seed)
        weights = trainer.engine.weights(policy)
        trainer.setup.engine.load(policy, weights, learners_of(trainer.engine)[policy].version)
    return trainer


def state_of(trainer: Trainer, learner: str) -> tuple[dict[str, Tensor], object]:
    """Return a learner's weights and its optimiser's state as they are now."""
    held = learners_of(trainer.engine)[learner].state()["optimizer"]
    moments = {key: frozen_copy(entry) for key, entry in held.items()}
    return frozen_copy(trainer.engine.weights(learner)), moments


class TestMap:
    def test_a_number_gives_every_agent_adapters_of_its_own(self) -> None:
        team = run_of().team
        assert team.turns_of == {"ada": ("ada@1", "ada@2"), "ben": ("ben@1", "ben@2")}
        assert team.trained == ("ada@1", "ada@2", "ben@1", "ben@2")
        assert team.agents_of("ada@2") == ("ada",)


class TestTraining:
    @pytest.mark.parametrize("shared", [False, True])
    def test_each_turn_carries_the_version_and_hash_of_its_own_weights(self, shared: bool) -> None:
        listed = {"per_turn": ["opening", "reply", "reply"]} if shared else {"per_turn": 3}
        trainer = run_of(listed, listed, rounds=3)
        hashes = {name: weights_hash(trainer.engine.weights(name)) for name in trainer.team.trained}
        first, second = steps = list(trainer.steps(2))
        assert max(step.metrics["parity/max"] for step in steps) <= 1e-4
        for episode in (e for group in first.groups for e in group.episodes):
            for agent in ("ada", "ben"):
                said = episode.by(agent)
                assert tuple(turn.policy for turn in said) == trainer.team.turns_of[agent]
                assert [turn.weights_hash for turn in said] == [hashes[turn.policy] for turn in said]
                # The prompt of turn 2 begins with turn 1's tokens, which other weights have read and kept.
                known = said[0].prompt_ids + said[0].completion_ids
                assert said[1].prompt_ids[: len(known)] == known
        assert {turn.version for _, turn in turns_of(second.groups)} == {1}
        assert {f"loss/{name}" for name in trainer.team.trained} <= second.metrics.keys()

    def test_the_update_of_one_turns_policy_moves_no_other_bit(self) -> None:
        trainer = run_of(
            algorithm={"name": "maporl", "order": {"name": "alternate"}, "group_size": 2},
            workflow={"name": "debate", "rounds": 2, "score_rounds": True},
            optimizer={"lr": 1e-2, "weight_decay": 0.1},
        )
        for expected in trainer.team.trained:
            before = {name: state_of(trainer, name) for name in trainer.team.trained}
            next(trainer.steps(1))
            moved = [name for name in before if not same_bits(before[name], state_of(trainer, name))]
            assert moved == [expected]

    def test_all_at_once_each_moves_as_it_does_alone(self) -> None:
        algorithm = {"name": "maporl", "group_size": 2, "epochs": 1}
        workflow = {"name": "debate", "rounds": 2, "score_rounds": True}
        together = run_of(algorithm=algorithm, workflow=workflow)
        next(together.steps(1))
        alone = run_of(algorithm={**algorithm, "order": {"name": "alternate"}}, workflow=workflow)
        next(alone.steps(1))
        for name, tensor in alone.engine.weights("ada@1").items():
            assert tensor.sub(together.engine.weights("ada@1")[name]).abs().max() <= 1e-6

    def test_a_critic_is_its_agents_in_all_turns(self) -> None:
        trainer = run_of(
            algorithm={"name": "maporl", "group_size": 2},
            workflow={"name": "debate", "rounds": 2, "score_rounds": True},
        )
        assert dict(trainer.team.critic_of) == {"ada": "critic:ada", "ben": "critic:ben"}
        assert "value_error/critic:ada" in next(trainer.steps(1)).metrics


class TestKeeping:
    @pytest.mark.slow
    def test_a_resumed_run_goes_on_bit_for_bit_and_keeps_each_adapter(self, tmp_path: Path) -> None:
        given = sections(training={"steps": 4, "tasks_per_step": 2}, checkpoint={"every": 2})
        agents = [{"name": name, "weights": OWN} for name in ("ada", "ben")]
        given["team"] = {**given["team"], "agents": agents}
        with Trainer(**given, run_dir=tmp_path / "whole") as whole:
            whole.train()
            kept = frozen_copy(whole.engine.weights("ben@2"))
        with resumed(given, tmp_path / "cut", after=2) as again:
            assert same_bits(kept, frozen_copy(again.engine.weights("ben@2")))
        assert told(tmp_path / "whole") == told(tmp_path / "cut")
        folder = tmp_path / "whole" / "checkpoints" / "00000004" / "policies"
        assert sorted(p.name for p in folder.iterdir()) == ["ada@1", "ada@2", "ben@1", "ben@2"]

    def test_what_is_kept_plays_the_turn_that_it_was_trained_in(self, tmp_path: Path) -> None:
        given = sections(training={"steps": 1, "tasks_per_step": 2})
        given["team"] = {**given["team"], "agents": [{"name": n, "weights": OWN} for n in ("ada", "ben")]}
        with Trainer(**given, run_dir=tmp_path / "run") as run:
            run.train()
        again = Trainer.from_run(tmp_path / "run")
        again.evaluate(2)
        hashes = {name: weights_hash(again.engine.weights(name)) for name in again.team.trained}
        for group in again.evaluate(2).groups:
            for turn in group.episodes[0].turns:
                assert turn.weights_hash == hashes[turn.policy]
        assert len(set(hashes.values())) == 4
        (episode, *_) = read_episodes(tmp_path / "run", 1)
        assert [turn.policy for turn in episode.by("ada")] == ["ada@1", "ada@2"]


def told(run: Path) -> list[dict[str, float]]:
    """Metrics of a run, times omitted."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


class TestRefusals:
    def test_a_turn_after_the_last_one_where_nobody_knew_how_many_there_are(self) -> None:
        trainer = run_of(
            environment={"name": "matrix", "rounds": 3, "rules": "none"},
            workflow={"name": "play"},
            algorithm={"name": "grpo", "group_size": 2, "team_reward": "individual"},
        )
        with pytest.raises(TrainingHalted, match=r"takes turn 3.*weights for .*2 turns"):
            next(trainer.steps(1))
