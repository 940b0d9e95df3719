"""On-policy distillation: by hand, its expected gradient enumerated, and a team that approaches its teacher."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.expected import Game, Tables, expected_update
from tests.support.tiny import SIZE, frozen_copy, same_bits, sections
from torch import Tensor

from kapelle import Trainer
from kapelle.algorithms.distill import Distill, TaughtCredit
from kapelle.algorithms.signals.teacher import TEACHER
from kapelle.errors import ConfigError
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.rows import Signals, TurnKey
from kapelle.settings.schema import ModelConfig

KEY = TurnKey(0, 0, 0)


@pytest.mark.parametrize(
    ("discount", "expected"), [(1.0, [-0.5, -1.0]), (0.5, [0.0, -1.0]), (0.0, [0.5, -1.0])]
)
def test_by_hand(discount: float, expected: list[float]) -> None:
    # log T − log π = −½ − −1 = ½, then −3 − −2 = −1.
    said = group(episode(turn("a", 0, completion_ids=(5, 6), logprobs=(-1.0, -2.0))))
    give = TaughtCredit(discount)
    credit = give([said], Signals(more={TEACHER: {KEY: torch.tensor([-0.5, -3.0])}}))
    assert credit[KEY].advantage_T.tolist() == pytest.approx(expected)
    assert give.metrics() == pytest.approx({"teacher_kl/a": 0.25})


def divergence(tables: Tables, teacher: Tables, game: Game, *, whole: bool) -> Tensor:
    """Σ over agents of the reverse KL to the teacher at the prompts that occur, from its definition.

    Over whole completions; or, not `whole`, token by token at the places that occur, which are held as they are.
    """
    total = torch.zeros((), dtype=torch.float64)
    assert isinstance(game.order, tuple)
    for outcome, count in game.outcomes():
        said = [game.words[k] for k in outcome]
        for place, (name, words) in enumerate(zip(game.order, said, strict=True)):
            prompt = game.prompt(said[:place])
            places = range(len(prompt), len(prompt) + len(words))
            own = tables.log_probs(name, (*prompt, *words), places)
            other = teacher.log_probs(name, (*prompt, *words), places).detach()
            before = count / 4 ** len(game.order)
            before /= math.prod(game.chance(words[:k])[token] for k, token in enumerate(words))
            if whole:
                # Σ_y π(y)·(log π(y) − log T(y)), the prompt as often as it occurs.
                total = total + before * own.sum().exp() * (own.sum() - other.sum())
            else:
                for k, token in enumerate(words):
                    # A token's own chance is π's; all before and after it stays as it was sampled.
                    chance = game.chance(words[:k])[token]
                    weight = before * math.prod(
                        game.chance(words[:j])[other_token] for j, other_token in enumerate(words) if j != k
                    )
                    assert chance > 0
                    total = total + weight * own[k].exp() * (own[k] - other[k])
    return total


CHAIN = Game(("a", "b"), lambda said: {"b": 0.0})


def test_the_baseline_is_the_other_episodes_at_the_same_position() -> None:
    # R: [½ − 1, −1] and [−3] at one task, [7] at another. At the first place the others' are −3 and −½, at the second
    # there is no one else.
    logprobs = [(-1.0, -2.0), (-1.0,), (-1.0,)]
    turns = [turn("a", 0, completion_ids=(5,) * len(each), logprobs=each) for each in logprobs]
    said = [group(episode(turns[0]), episode(turns[1])), group(episode(turns[2]))]
    taught = {
        KEY: torch.tensor([-0.5, -3.0]),
        TurnKey(0, 1, 0): torch.tensor([-4.0]),
        TurnKey(1, 0, 0): torch.tensor([6.0]),
    }
    credit = TaughtCredit(1.0)(said, Signals(more={TEACHER: taught}))
    assert [given.advantage_T.tolist() for given in credit.values()] == [[2.5, -1.0], [-2.5], [7.0]]


def test_a_checkpoint_holds_the_earlier_returns() -> None:
    # One attempt: R is ½ in the first step and −3 in the second, 3½ below it.
    said = [group(episode(turn("a", 0, completion_ids=(5,), logprobs=(-1.0,))))]
    first, then = (Signals(more={TEACHER: {KEY: torch.tensor([logp])}}) for logp in (-0.5, -4.0))
    before, after = TaughtCredit(1.0), TaughtCredit(1.0)
    assert before(said, first)[KEY].advantage_T.tolist() == [0.5]
    after.load_state(before.state())
    for give in (before, after):
        assert give(said, then)[KEY].advantage_T.tolist() == [-3.5]


def test_each_turn_is_compared_with_earlier_turns_of_the_same_number() -> None:
    turns = [turn("a", k, completion_ids=(5,), logprobs=(-1.0,)) for k in range(2)]
    give = TaughtCredit(1.0)
    for logps, expected in (((-0.5, -4.0), [0.5, -3.0]), ((0.0, -2.0), [1.0 - 0.5, -1.0 + 3.0])):
        taught = {TurnKey(0, 0, k): torch.tensor([logp]) for k, logp in enumerate(logps)}
        credit = give([group(episode(*turns))], Signals(more={TEACHER: taught}))
        assert [float(credit[TurnKey(0, 0, k)].advantage_T) for k in range(2)] == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("discount", "whole"), [(1.0, True), (0.0, False)])
def test_the_expected_update_descends_the_reverse_kl(discount: float, *, whole: bool, size: int) -> None:
    teacher = Tables(CHAIN, seed=3)
    tables, _ = expected_update(
        Distill(teacher="t", discount=discount, group_size=size).build(), CHAIN, teacher=teacher
    )
    true = torch.autograd.grad(divergence(tables, teacher, CHAIN, whole=whole), list(tables.logits.values()))
    for name, gradient in zip(tables.logits, true, strict=True):
        moved = tables.ascent[name]
        factor = float(-(moved * gradient).sum() / gradient.square().sum())
        assert factor > 0
        torch.testing.assert_close(moved, -factor * gradient, atol=1e-6, rtol=1e-5)
        other = torch.autograd.grad(divergence(tables, teacher, CHAIN, whole=not whole), tables.logits[name])[
            0
        ]
        assert float((moved / moved.norm() + other / other.norm()).norm()) > 0.01, (
            "the other form is another one"
        )


def opinionated(seed: int = 5) -> LanguageModel:
    """A model of another seed that is sure of what it says."""
    config = ModelConfig.model_validate({"embedded": {**SIZE, "seed": seed}})
    model = load_language_model(config)
    with torch.no_grad():
        for parameter in model.model.get_output_embeddings().parameters():
            parameter.mul_(3.0)
    return model


def taught(teacher: Any = "teacher", **changes: Any) -> Trainer:
    given = {
        "team": {"agents": 2, "sharing": "lora", "sampling": {"max_tokens": 1}},
        "workflow": {"name": "parallel"},
        "environment": {"name": "matrix", "game": "stag_hunt", "rules": "none"},
        "algorithm": {"name": "distill", "teacher": teacher},
        "optimizer": {"lr": 3e-2},
        "training": {"steps": 40, "tasks_per_step": 16},
        "models": {"teacher": opinionated()},
        **changes,
    }
    return Trainer(**sections(**given))


def test_a_past_self_teaches_what_it_had_learned(tmp_path: Path) -> None:
    with taught(training={"steps": 6, "tasks_per_step": 8}) as trainer:
        list(trainer.steps())
        trainer.save_policies(tmp_path)
        [first] = [policy for policy in trainer.team.trained if policy == "agent_0"]
        learned = frozen_copy(trainer.engine.weights(first))
    folder = str(tmp_path / "policies" / "agent_0")
    with taught(teacher=folder, training={"steps": 2, "tasks_per_step": 4}) as trainer:
        assert same_bits(learned, frozen_copy(trainer.engine.weights("teacher:agent_1")))
        rows = [step.metrics for step in trainer.steps()]
        assert same_bits(learned, frozen_copy(trainer.engine.weights("teacher:agent_1")))
    assert rows[0]["teacher_kl/agent_1"] > 0.0


def test_each_policy_can_have_its_own_teacher() -> None:
    own = {"agent_0": "teacher", "agent_1": "other"}
    both = {"teacher": opinionated(), "other": opinionated(6)}
    with taught(own, models=both, training={"steps": 1, "tasks_per_step": 2}) as trainer:
        assert trainer.team.bases["teacher:other"] == "other"
        assert {"teacher_kl/agent_0", "teacher_kl/agent_1"} < next(trainer.steps(1)).metrics.keys()


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"agent_0": "teacher"}, "Policy 'agent_1' has no teacher"),
        ({"agent_0": "teacher", "agent_2": "teacher"}, "Did you mean 'agent_1'"),
    ],
)
def test_policies_without_a_teacher_raise_an_error(teacher: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        taught(teacher)


def test_a_teacher_with_another_tokeniser_raises_an_error_before_a_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stranger = opinionated()
    tokens = stranger.renderer.tokenizer
    monkeypatch.setattr(tokens, "get_vocab", lambda: {"another": 0})
    with pytest.raises(ConfigError, match=r"has a different vocabulary\. Use a model of the same family"):
        taught(models={"teacher": stranger})
