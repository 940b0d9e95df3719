"""A verifier that continues learning while it pays: what it learns from, what that costs in labels, and that it repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.algorithms.test_every_algorithm import run_of
from tests.support.episodes import episode, turn
from tests.support.ranks import run_ranks
from tests.support.tiny import frozen_copy, learners_of, same_bits, tiny_model, train_engine

from kapelle import Trainer
from kapelle.algorithms.signals.verifier import calibration_of, verifier_samples
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.features.reward_model.feature import RefreshedVerifier
from kapelle.features.reward_model.settings import RefreshConfig
from kapelle.models.adapters import read_lora
from kapelle.runs.checkpoint_contents import load_verifier
from kapelle.runs.reader import read_metrics
from kapelle.team import VERIFIER, Critic, Lora
from kapelle.types import Group, Task

Said = tuple[str, float | None]
"""An answer and its grade."""


def groups_of(said: Sequence[Said]) -> list[Group]:
    """One group, with one answer, for each."""
    made = []
    for number, (text, score) in enumerate(said):
        task = Task(f"t{number}", "?")
        made.append(Group(task, (episode(turn("a", 0, text=text, score=score), task=task),)))
    return made


def judge(rank: int = 4) -> TorchTrainEngine:
    critic = Critic(VERIFIER, lora=Lora(rank=rank, alpha=2.0 * rank))
    return train_engine([], [critic], models={"base": tiny_model(hidden=32, intermediate=64)}, lr=3e-3)


def refreshed(settings: RefreshConfig, engine: TorchTrainEngine) -> RefreshedVerifier:
    run: Any = SimpleNamespace(config=SimpleNamespace(seed=0), engine=engine)
    return RefreshedVerifier(settings, run)


class TestLearning:
    """The team says a word that begins with `a` or `b`; once it has found out that `a` pays, it says `a` alone."""

    def test_right_and_wrong_weigh_the_same(self) -> None:
        # Nine right answers and a wrong one, alike to it: what it believes of them is one half.
        engine = judge()
        verifier = refreshed(RefreshConfig(share=1.0, updates=50, memory=10), engine)
        said = groups_of([("a", 1.0)] * 9 + [("a", 0.0)])
        verifier.learn(1, said)
        samples = verifier_samples(said, engine.renderer(VERIFIER))
        assert float(engine.score(list(samples.values()))[0].sigmoid()) == pytest.approx(0.5, abs=0.1)


class TestLabels:
    def test_a_share_of_the_answers_is_graded_and_the_newest_are_remembered(self) -> None:
        verifier = refreshed(RefreshConfig(share=0.3, updates=1, memory=5), judge())
        first = verifier.learn(1, groups_of([(f"a{k}", float(k % 2)) for k in range(10)]))
        assert first["verifier_labels"] == 3
        second = verifier.learn(2, groups_of([(f"b{k}", float(k % 2)) for k in range(10)]))
        assert second["verifier_labels"] == 6
        remembered: Any = verifier.state()["remembered"]
        assert [text[0] for _, text, _ in remembered] == ["a", "a", "b", "b", "b"]
        assert all(label == float(int(text[1]) % 2) for _, text, label in remembered)

    def test_answers_of_one_kind_teach_nothing(self) -> None:
        engine = judge()
        before = frozen_copy(engine.weights(VERIFIER))
        refreshed(RefreshConfig(share=1.0), engine).learn(1, groups_of([("a", 1.0)] * 4))
        assert same_bits(before, frozen_copy(engine.weights(VERIFIER)))


REFRESH: Mapping[str, Any] = {"share": 0.5, "lr": 1e-2, "updates": 2, "batch": 8, "memory": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier, trained on answers of the frozen team."""
    place = tmp_path_factory.mktemp("judge")
    with Trainer(**run_of("verifier")) as made:
        made.train(1)
        made.save_policies(place)
    return place / "verifier"


def paid(folder: Path, refresh: Mapping[str, Any] | None = REFRESH, **over: Any) -> dict[str, Any]:
    """Debaters whom the verifier pays."""
    own = {"verifier": str(folder), "least_auc": None, "refresh": refresh}
    settings = run_of("maporl")
    return {**settings, "algorithm": {**settings["algorithm"], **own}, **over}


def weights_of(trainer: Trainer) -> dict[str, Any]:
    return {name: frozen_copy(trainer.engine.weights(name)) for name in learners_of(trainer.engine)}


def told(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("time/")}


class TestRuns:
    def test_it_learns_beside_the_debaters_and_moves_none_of_them(self, folder: Path) -> None:
        with Trainer(**paid(folder)) as trainer, Trainer(**paid(folder, None)) as frozen:
            assert VERIFIER not in learners_of(frozen.engine)
            before = frozen_copy(trainer.engine.weights(VERIFIER))
            step, other = next(trainer.steps(1)), next(frozen.steps(1))
            after = weights_of(trainer)
            assert not same_bits(before, after.pop(VERIFIER))
            # The first step is paid by what was saved, and its answers are learned from when it is over.
            assert same_bits(after, weights_of(frozen))
            assert told(other.metrics).items() <= told(step.metrics).items()
            answers = sum(len(e.turns) for group in step.groups for e in group.episodes)
            assert step.metrics["verifier_labels"] == round(0.5 * answers)

    def test_a_resumed_run_goes_on_bit_for_bit(self, folder: Path, tmp_path: Path) -> None:
        given = paid(folder, checkpoint={"every": 1, "keep": 9})
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        with Trainer(**given, run_dir=whole) as trainer:
            list(trainer.steps(3))
            expected = weights_of(trainer), trainer.engine.state(), trainer.loop.state()
        with Trainer(**given, run_dir=cut) as trainer:
            list(trainer.steps(2))
        with Trainer(**given, run_dir=cut, resume=True) as trainer:
            list(trainer.steps(1))
            assert same_bits((weights_of(trainer), trainer.engine.state(), trainer.loop.state()), expected)
        assert [told(row) for row in read_metrics(cut)] == [told(row) for row in read_metrics(whole)]

    def test_a_checkpoint_holds_it_as_a_verifier_that_may_pay_again(
        self, folder: Path, tmp_path: Path
    ) -> None:
        with Trainer(**paid(folder), run_dir=tmp_path / "run") as trainer:
            next(trainer.steps(1))
            saved = trainer.save() / "verifier"
            learned = frozen_copy(trainer.engine.weights(VERIFIER))
            held_out = json.loads((saved / "verifier.json").read_text())["held_out"]
            assert calibration_of(str(saved)) == calibration_of(str(folder))
            assert "auc" not in held_out, "it was not measured since it learned"
            critic = Critic(VERIFIER, lora=read_lora(saved))
            engine = train_engine([], [critic], models=trainer.models)
            load_verifier(saved, critic, trainer.models, engine)
            assert same_bits(learned, frozen_copy(engine.weights(VERIFIER)))


def learned_by(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, float]]]:
    with Trainer(**settings) as trainer:
        rows = [told(step.metrics) for step in trainer.steps(3)]
        return {VERIFIER: frozen_copy(trainer.engine.weights(VERIFIER))}, rows


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_all_ranks_have_the_same_verifier_and_learn_what_one_learns(folder: Path, engine: str) -> None:
    settings = paid(folder, optimizer={"lr": 1e-2, "eps": 1e-4})  # no division by rounding
    alone, rows = learned_by(settings)
    shared = {**settings, "train_engine": {"name": engine}}
    for weights, theirs in (first := run_ranks(2, learned_by, shared)):
        assert same_bits(weights, first[0][0])
        assert [row["verifier_labels"] for row in theirs] == [row["verifier_labels"] for row in rows]
        for key, tensor in weights[VERIFIER].items():
            assert torch.allclose(tensor, alone[VERIFIER][key], atol=1e-5), key
