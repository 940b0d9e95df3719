"""Verifiers: labels, balance and losses by hand; training, evaluation on held-out questions, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.copies import Copies
from tests.support.episodes import episode, group, turn
from tests.support.tiny import SIZE, frozen_copy, learners_of, same_bits, sections, tiny_model

from kapelle.algorithm import Targets
from kapelle.algorithms.signals.samples import conversation_sample
from kapelle.algorithms.signals.verifier import verifier_samples
from kapelle.algorithms.verifier import (
    Verifier,
    VerifierTargets,
    balanced,
    bradley_terry_over_pairs,
    step_ends,
    weighted_cross_entropy,
)
from kapelle.errors import ConfigError, ContextError, ModelError
from kapelle.functional.statistics import area_under_curve
from kapelle.models.checksums import write_checksums
from kapelle.rows import Signals, TurnKey, label_of
from kapelle.runs.checkpoint_contents import load_verifier
from kapelle.team import VERIFIER
from kapelle.training.trainer import Trainer
from kapelle.types import Group, Message, Task

JUDGE = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "context": 128}


def run_of(algorithm: dict[str, Any] | None = None, **over: Any) -> Trainer:
    return Trainer(
        **sections(
            **{
                "environment": {"name": "tests.support.copies:Copies", "letters": 3},
                "workflow": {"name": "solo"},
                "algorithm": {"name": "verifier", "data": "recorded", "group_size": 6, **(algorithm or {})},
                "team": {"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 8, "alpha": 16.0}},
                "model": {"embedded": JUDGE},
                "training": {"steps": 70, "tasks_per_step": 24},
                **over,
            }
        )
    )


class TestLabels:
    def test_a_turn_s_score_takes_precedence_over_rewards(self) -> None:
        one = episode(turn("a", 0, score=0.25), turn("a", 1), turn("b", 2), rewards={"a": 1.0})
        assert [label_of(one, each) for each in one.turns] == [0.25, 1.0, None]

    def test_the_terminal_reward_labels_only_the_last_turn(self) -> None:
        one = episode(turn("a", 0), turn("a", 1), rewards={"a": 1.0})
        assert label_of(one, one.turns[0]) is None


def test_right_and_wrong_answers_to_one_question_weigh_the_same() -> None:
    assert balanced([1.0, 0.0, 0.0, 0.0]) == pytest.approx([2.0, 2 / 3, 2 / 3, 2 / 3])
    assert balanced([1.0, 1.0]) == [0.0, 0.0]
    assert balanced([]) == []


def answers(*scores: float) -> Group:
    return group(*(episode(turn("a", 0, trained=False), rewards={"a": score}) for score in scores))


def judged(groups: list[Group]) -> Signals:
    return Signals(
        {TurnKey(g, e, 0): torch.zeros(1) for g, each in enumerate(groups) for e in range(len(each.episodes))}
    )


class TestTargets:
    def test_a_question_that_all_answer_rightly_teaches_nothing(self) -> None:
        groups = [answers(1.0, 0.0, 0.0), answers(1.0, 1.0)]
        given = VerifierTargets(Verifier())(groups, judged(groups))
        assert given[TurnKey(0, 0, 0)].weight == pytest.approx(1.5)
        assert given[TurnKey(0, 1, 0)].weight == pytest.approx(0.75)
        assert given[TurnKey(1, 0, 0)].return_T is None

    def test_without_balance_every_answer_weighs_one(self) -> None:
        groups = [answers(1.0, 1.0)]
        given = VerifierTargets(Verifier(balance="none"))(groups, judged(groups))
        assert [(c.weight, float(c.return_T)) for c in given.values() if c.return_T is not None] == [
            (1.0, 1.0)
        ] * 2

    def test_pairs_are_made_of_one_question(self) -> None:
        groups = [answers(1.0, 0.0, 0.0, 1.0), answers(0.0, 1.0, 1.0)]
        given = VerifierTargets(Verifier(objective="pairs"))(groups, judged(groups))
        told = {key: (c.pair, None if c.return_T is None else float(c.return_T)) for key, c in given.items()}
        assert told == {
            TurnKey(0, 0, 0): (0, 1.0), TurnKey(0, 1, 0): (0, 0.0),
            TurnKey(0, 3, 0): (1, 1.0), TurnKey(0, 2, 0): (1, 0.0),
            TurnKey(1, 1, 0): (2, 1.0), TurnKey(1, 0, 0): (2, 0.0),
            TurnKey(1, 2, 0): (None, None),
        }  # fmt: skip

    def test_metrics_report_accuracy_before_the_update(self) -> None:
        groups = [answers(1.0, 0.0, 0.0, 1.0)]
        values = {TurnKey(0, e, 0): torch.tensor([v]) for e, v in enumerate((2.0, 1.0, 3.0, 4.0))}
        targets = VerifierTargets(Verifier())
        targets(groups, Signals(values))
        # Of the four (right, wrong) pairs 2>1, 4>1 and 4>3 are the right way round.
        assert targets.metrics() == {"verifier_right_share": 0.5, "verifier_auc": 0.75}


def worked(*solutions: tuple[str, float]) -> Group:
    """Return solutions of 47+85, each with what the environment paid."""
    task = Task("train-0", "47+85", {})
    return Group(
        task,
        tuple(
            episode(turn("a", 0, text=text, trained=False), task=task, rewards={"a": paid})
            for text, paid in solutions
        ),
    )


class TestProcess:
    """`labels: process`: a value and a label after each step of a worked solution, and one at its end."""

    RIGHT, SLIPPED, LOST, PLAIN = "120+12=132", "120+12=122", "110+12=122", "132"

    def test_every_step_is_labelled_by_working_it_out_again(self) -> None:
        groups = [worked((self.RIGHT, 1.0), (self.SLIPPED, 0.0), (self.LOST, 0.0), (self.PLAIN, 1.0))]
        values = {TurnKey(0, e, 0): torch.zeros(3) for e in range(3)} | {TurnKey(0, 3, 0): torch.zeros(1)}
        given = VerifierTargets(Verifier(labels="process"))(groups, Signals(values))
        found = [given[TurnKey(0, e, 0)].return_T for e in range(4)]
        assert [None if each is None else each.tolist() for each in found] == [
            [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0],
        ]  # fmt: skip
        # By outcome alone there is one value, whatever the solution looks like.
        given = VerifierTargets(Verifier())(groups, judged(groups))
        assert [each.return_T.tolist() for each in given.values() if each.return_T is not None] == [
            [1.0], [0.0], [0.0], [1.0],
        ]  # fmt: skip

    def test_values_stand_after_the_tokens_that_end_a_step(self) -> None:
        # The embedded model's tokens are bytes.
        reader = tiny_model().renderer
        start = len(reader.start([Message("user", "47+85")]))
        sample = conversation_sample(
            VERIFIER, reader, [Message("user", "47+85")], self.RIGHT, {}, step_ends("47+85", self.RIGHT)
        )
        assert [target - start for target in sample.targets] == [6, 10, 11]
        assert conversation_sample(VERIFIER, reader, [Message("user", "47+85")], self.RIGHT, {}).targets == (
            start + 11,
        )

    def test_a_step_that_ends_inside_a_token_has_its_value_after_the_token(self) -> None:
        class Pairs:
            """Two characters a token, and an end of turn."""

            context = 99

            def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
                return (0, 0, 0)

            def extend(self, *_: object) -> tuple[int, ...]:
                raise AssertionError("the conversation has one turn")

            def completion(self, text: str) -> tuple[int, ...]:
                return (*(hash(text[k : k + 2]) for k in range(0, len(text), 2)), -1)

            def decode(self, ids: Sequence[int]) -> str:
                raise AssertionError("nothing is read back")

        # `1+1=2=2` is 1+ 1= 2= 2 and the end: the sides end after 3, 5 and 7 characters, in the tokens 2, 3 and 4.
        sample = conversation_sample(VERIFIER, Pairs(), [Message("user", "1+1")], "1+1=2=2", {}, [3, 5, 7])
        assert sample.targets == (3 + 2, 3 + 3, 3 + 4, 3 + 5)
        # Ends in one token: the earlier one is judged a token before, and what has none left is not judged.
        assert conversation_sample(
            VERIFIER, Pairs(), [Message("user", "q")], "=1=1", {}, [1, 2, 3, 4]
        ).targets == (4, 5, 6)

    def test_of_pairs_the_ends_are_compared_and_the_steps_learn_by_cross_entropy(self) -> None:
        # A pair: right with one step of score 0 (label 1), end ln 3; wrong with one step of score 0 (label 0), end 0.
        targets = targets_of(**{"return": [1.0, 1.0, 0.0, 0.0]})
        targets = replace(
            targets, segment_K=torch.tensor([0, 0, 1, 1]), segments=2, pair_S=torch.tensor([7, 7])
        )
        scores = torch.tensor([0.0, math.log(3), 0.0, 0.0], dtype=torch.float64)
        loss = bradley_terry_over_pairs(scores, targets)
        assert loss.total.item() == pytest.approx(math.log(4 / 3) + math.log(2))
        assert loss.weight.item() == 1


def targets_of(**columns: list[float]) -> Targets:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    count = len(next(iter(columns.values())))
    return Targets(torch.arange(count), count, torch.ones(count), tensors)


def test_cross_entropy_by_hand() -> None:
    # σ(0) = ½ costs ln 2, σ(ln 3) = ¾ of a wrong answer costs ln 4; weights 3 and 1.
    targets = targets_of(**{"return": [1.0, 0.0], "weight": [3.0, 1.0]})
    loss = weighted_cross_entropy(torch.tensor([0.0, math.log(3)], dtype=torch.float64), targets)
    assert loss.total.item() == pytest.approx(3 * math.log(2) + math.log(4))
    assert loss.weight.item() == 4


def test_pairs_by_hand() -> None:
    # Margins ln 3 and −1: −log ¾ and −log σ(−1), one of two the right way round.
    targets = replace(targets_of(**{"return": [1.0, 0.0, 0.0, 1.0]}), pair_S=torch.tensor([4, 2, 4, 2]))
    scores = torch.tensor([math.log(3), 1.0, 0.0, 0.0], dtype=torch.float64)
    loss = bradley_terry_over_pairs(scores, targets)
    assert loss.total.item() == pytest.approx(math.log(4 / 3) + math.log(1 + math.e))
    assert loss.weight.item() == 2
    assert loss.metrics["verifier_accuracy"][0].item() == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("objective", "lr", "steps"), [("labels", 1e-2, 60), ("pairs", 5e-3, 80)])
def test_it_learns_to_judge_questions_it_was_never_shown(objective: str, lr: float, steps: int) -> None:
    environment = Copies(letters=4)
    run = run_of(
        {"objective": objective},
        environment=environment,
        optimizer={"lr": lr},
        training={"steps": steps, "tasks_per_step": 20},
    )
    for _ in run.steps():
        pass
    reader = run.engine.renderer(VERIFIER)
    seen = {environment.task("train", k).question for k in range(environment.size("train") or 0)}
    samples, right = [], []
    for index in range(60):
        task = environment.task("test", index)
        assert task.question not in seen
        for seed in range(6):
            text = environment.script("agent_0", task, [], seed)
            samples.append(conversation_sample(VERIFIER, reader, task.prompt_messages, text, {}))
            right.append(text == task.question)
    area = area_under_curve([float(score) for score in run.engine.score(samples)], right)
    assert area is not None
    assert area >= 0.9


class TestKept:
    def test_nothing_but_the_verifier_learns_and_its_folder_gives_the_same_scores(
        self, tmp_path: Path
    ) -> None:
        run = run_of(
            training={"steps": 3, "tasks_per_step": 8}, model={"embedded": SIZE}, run_dir=tmp_path / "run"
        )
        base = frozen_copy(run.models["base"].base_parameters())
        run.train()
        assert list(learners_of(run.engine)) == [VERIFIER]
        assert same_bits(base, frozen_copy(run.models["base"].base_parameters()))
        folder = next((tmp_path / "run" / "checkpoints").glob("*3")) / "verifier"

        other = run_of(model={"embedded": SIZE})
        groups = [Group(t, (episode(turn("a", 0, text=text), task=t),)) for t, text in self.texts()]
        asked = list(verifier_samples(groups, other.engine.renderer(VERIFIER)).values())
        before = other.engine.score(asked)
        load_verifier(folder, other.team.critics[VERIFIER], other.models, other.engine)
        assert not same_bits(before, other.engine.score(asked))
        assert same_bits(run.engine.score(asked), other.engine.score(asked))
        run.close()

    @staticmethod
    def texts() -> list[tuple[Any, str]]:
        return [(Copies(letters=3).task("test", k), text) for k, text in enumerate(("abc", "fff", "a"))]

    def test_another_base_raises_an_error(self, tmp_path: Path) -> None:
        run = run_of(training={"steps": 1, "tasks_per_step": 4}, model={"embedded": SIZE})
        run.save_policies(tmp_path)
        other = run_of(model={"embedded": {**SIZE, "seed": 1}})
        with pytest.raises(ModelError, match="a different base model"):
            load_verifier(tmp_path / "verifier", other.team.critics[VERIFIER], other.models, other.engine)

    def test_a_folder_without_a_verifier_raises_an_error(self, tmp_path: Path) -> None:
        run = run_of(model={"embedded": SIZE})
        run.save_policies(tmp_path)
        (tmp_path / "verifier" / "value_head.safetensors").unlink()
        write_checksums(tmp_path / "verifier")
        with pytest.raises(ModelError, match="does not hold a verifier"):
            load_verifier(tmp_path / "verifier", run.team.critics[VERIFIER], run.models, run.engine)


def test_a_trained_team_raises_an_error_with_a_fix() -> None:
    with pytest.raises(ConfigError, match=r"team.sharing: frozen"):
        run_of(team={"sharing": "lora", "agents": 1})


def test_a_frozen_team_may_train_a_verifier_from_its_own_rollouts() -> None:
    run = run_of(
        {"data": "rollout", "balance": "none"},
        environment={"name": "tests.support.plugins:Digest", "levels": 2},
        model={"embedded": SIZE},
        training={"steps": 1, "tasks_per_step": 4},
        team={"sharing": "frozen", "agents": 2, "sampling": {"max_tokens": 4}},
        workflow={"name": "debate"},
    )
    row = next(run.steps(1)).metrics
    assert row[f"loss/{VERIFIER}"] == pytest.approx(math.log(2), abs=1e-6)


def test_an_answer_too_long_for_the_verifier_raises_an_error() -> None:
    run = run_of(model={"embedded": SIZE})
    with pytest.raises(ContextError, match="verifier's model is 256"):
        conversation_sample(
            VERIFIER, run.engine.renderer(VERIFIER), [Message("user", "q" * 200)], "a" * 80, {}
        )
