"""DPO: pairs by hand, the loss compared with the written formula, and its gradient through the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.support.copies import Copies
from tests.support.episodes import episode, group, turn
from tests.support.tiny import (
    SIZE,
    first_gradient,
    lora_policies,
    model_of,
    sections,
    stir,
    train_engine,
    with_columns,
)
from torch import Tensor

from kapelle.algorithm import Outputs, Targets
from kapelle.algorithms.dpo import DPO, pairs_of
from kapelle.algorithms.signals.reference import samples_for
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.environments.recorded import Preferences
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import rollout
from kapelle.rows import Sample, Sampled, Signals, TurnKey
from kapelle.runtime.event_loop import run_async
from kapelle.setup.model_loading import teacher
from kapelle.setup.recipe import resolve
from kapelle.team import reference_name
from kapelle.training.trainer import Trainer
from kapelle.types import Split

# Agent a earns 1, 3, 2 and b 5, 0, 5: a's pair is (1, 0), b's (0, 1); the team's mean is 3, 1.5, 3.5.
GROUP = group(
    *(
        episode(turn("a", 0), turn("b", 1), turn("a", 2, 1), rewards={"a": a, "b": b})
        for a, b in ((1.0, 5.0), (3.0, 0.0), (2.0, 5.0))
    )
)


def test_every_agent_has_the_pair_of_its_own_returns() -> None:
    assert pairs_of(GROUP, "individual") == {"a": (1, 0), "b": (0, 1)}


def test_a_shared_return_gives_all_agents_the_same_pair() -> None:
    assert pairs_of(GROUP, "mean") == {"a": (2, 1), "b": (2, 1)}


def test_equal_returns_and_frozen_agents_give_no_pair() -> None:
    same = group(*(episode(turn("a", 0), rewards={"a": 1.0}) for _ in range(2)))
    assert pairs_of(same, "mean") == {}
    frozen = group(*(episode(turn("a", 0, trained=False), rewards={"a": r}) for r in (0.0, 1.0)))
    assert pairs_of(frozen, "mean") == {}


def test_a_failed_episode_is_on_no_side() -> None:
    failed = group(
        episode(turn("a", 0), rewards={"a": 1.0}),
        episode(turn("a", 0), error="broke"),
        episode(turn("a", 0), rewards={"a": 0.5}),
    )
    assert pairs_of(failed, "mean") == {"a": (0, 2)}


def test_credit_marks_all_turns_of_both_sides_and_leaves_the_rest_out() -> None:
    credit = DPO(team_reward="individual", group_size=3).credit([GROUP, GROUP], Signals())
    told = {key: (given.pair, given.weight, given.advantage_T.tolist()) for key, given in credit.items()}
    assert told[TurnKey(0, 1, 0)] == (0, 1.0, [1.0, 1.0])
    assert told[TurnKey(0, 1, 2)] == (0, 1.0, [1.0])
    assert told[TurnKey(0, 0, 0)] == (0, 1.0, [-1.0, -1.0])
    assert told[TurnKey(0, 0, 1)] == (1, 1.0, [1.0, 1.0])
    assert told[TurnKey(0, 1, 1)] == (1, 1.0, [-1.0, -1.0])
    assert all(told[TurnKey(g, 2, k)][1] == 0.0 for g in range(2) for k in range(3))
    assert told[TurnKey(1, 1, 0)][0] == 2


def targets(pair: list[float], side: list[float], reference: list[float]) -> Targets:
    columns = {"advantage": side, "reference": reference}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return Targets(torch.arange(len(pair)), len(pair), torch.ones(len(pair)), tensors, torch.tensor(pair))


class TestTwoPairsMixed:
    """Pair 7: chosen tokens −1, −2 (reference −2, −3), rejected −4 (−1). Pair 9: chosen −1 (−1), rejected −2, −2 (−1, −1).

    Δ of sums: 2 − (−3) = 5, and 0 − (−2) = 2. Δ of means: 1 − (−3) = 4, and 0 − (−1) = 1.
    """

    PAIR, SIDE = (7, 9, 7, 9, 7, 9), (1, -1, -1, 1, 1, -1)
    REFERENCE = (-2, -1, -1, -1, -3, -1)
    LOGP = torch.tensor([-1, -2, -4, -1, -2, -2], dtype=torch.float64)

    def targets(self) -> Targets:
        return targets([*map(float, self.PAIR)], [*map(float, self.SIDE)], [*map(float, self.REFERENCE)])

    def test_dpo(self) -> None:
        loss = DPO(beta=0.5).loss()(Outputs(self.LOGP), self.targets())
        assert loss.total.item() == pytest.approx(math.log(1 + math.exp(-2.5)) + math.log(1 + math.exp(-1.0)))
        assert loss.weight.item() == 2
        margin, count = loss.metrics["preference_margin"]
        assert margin.item() == pytest.approx(3.5)
        assert count.item() == 2
        assert loss.metrics["preference_accuracy"][0].item() == 2
        assert loss.metrics["chosen_logp"][0].item() == pytest.approx(-1.5 - 1)
        assert loss.metrics["rejected_logp"][0].item() == pytest.approx(-4 - 2)

    def test_smoothed(self) -> None:
        loss = DPO(beta=0.5, label_smoothing=0.25).loss()(Outputs(self.LOGP), self.targets())
        by_hand = sum(
            0.75 * math.log(1 + math.exp(-m)) + 0.25 * math.log(1 + math.exp(m)) for m in (2.5, 1.0)
        )
        assert loss.total.item() == pytest.approx(by_hand)

    def test_the_likelihood_of_the_chosen_side_is_per_token(self) -> None:
        # Chosen log-probs per token: −1.5 of pair 7, −1 of pair 9.
        for kind in ("dpo", "ipo"):
            plain, held = (
                DPO(kind=kind, nll=nll).loss()(Outputs(self.LOGP), self.targets()) for nll in (0.0, 2.0)
            )
            assert (held.total - plain.total).item() == pytest.approx(2 * (1.5 + 1))
            assert held.weight.item() == plain.weight.item() == 2

    def test_ipo(self) -> None:
        # 1/(2β) = 2: (4 − 2)² + (1 − 2)²
        assert DPO(kind="ipo", beta=0.25).loss()(
            Outputs(self.LOGP), self.targets()
        ).total.item() == pytest.approx(5.0)


# (pair, side, tokens of prompt and completion); pair 0 has two turns on its chosen side.
SIDES = [(0, 1.0, (3, 4)), (1, -1.0, (5, 3)), (0, 1.0, (6, 2)), (0, -1.0, (3, 5)), (1, 1.0, (5, 6))]


def engine(max_tokens: int = 4096) -> TorchTrainEngine:
    """Two policies that no longer stand at their references."""
    made = train_engine(lora_policies("p", "q"), references=True, limits=UpdateLimits(max_tokens))
    for seed, name in enumerate("pq"):
        stir(made.weights(name), 50 + seed)
    return made


def paired(made: TorchTrainEngine) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for learner in "pq":
        for pair, side, (prompt, completion) in SIDES:
            tokens = tuple(torch.randint(6, 262, (prompt + completion,), generator=generator).tolist())
            columns = {"advantage": torch.full((completion,), side)}
            places = tuple(range(prompt, prompt + completion))
            samples.append(Sample(learner, tokens, places, columns, bundle=pair))
    asked = [Sample(reference_name(s.learner), s.tokens, s.targets) for s in samples]
    return with_columns(samples, reference=made.score(asked))


def logp_alone(made: TorchTrainEngine, sample: Sample) -> Tensor:
    """Summed log-prob of a completion by one plain pass of the transformers model, with gradient."""
    model = model_of(made, sample.learner)
    with model.bank.routed([(sample.learner, 0, 1)]):
        logits = model.model(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0]
    places = torch.tensor(sample.targets)
    return (
        torch.log_softmax(logits, -1)[places - 1]
        .gather(1, torch.tensor(sample.tokens)[places][:, None])
        .sum()
    )


@pytest.mark.parametrize("max_tokens", [4096, 20, 1])
def test_the_gradient_is_that_of_the_formula_however_passes_are_cut(max_tokens: int) -> None:
    made = engine(max_tokens)
    samples = paired(made)
    expected = {}
    for name in "pq":
        own = [s for s in samples if s.learner == name]
        total = torch.zeros(())
        for pair in (0, 1):
            gap = torch.zeros(())
            for sample in own:
                if sample.bundle == pair:
                    side = sample.columns["advantage"][0]
                    gap = gap + side * (logp_alone(made, sample) - sample.columns["reference"].sum())
            total = total + torch.log1p(torch.exp(-0.3 * gap))
        parameters = made.learners[name].parameters
        grads = torch.autograd.grad(total / 2, list(parameters.values()))
        expected[name] = dict(zip(parameters, grads, strict=True))
    loss = DPO(beta=0.3).build().policy_loss
    made.update(samples, Objective(loss, parity=False))
    for name in "pq":
        got = torch.cat([g.flatten() for g in first_gradient(made, name).values()])
        want = torch.cat([expected[name][key].flatten() for key in first_gradient(made, name)])
        # The norm is clipped at 1, so directions are compared, and lengths where nothing was clipped.
        scale = min(1.0, 1.0 / float(want.norm()))
        assert float((got - scale * want).norm() / (scale * want).norm()) < 1e-4


def test_a_group_of_one_raises_an_error_with_a_fix() -> None:
    with pytest.raises(ConfigError, match=r"preferences.*group_size: 2"):
        resolve(sections(algorithm={"name": "dpo", "group_size": 1}))


@pytest.mark.long
@pytest.mark.slow
def test_it_learns_which_of_two_recorded_answers_to_prefer(tmp_path: Path) -> None:
    words = Copies(letters=4)

    def rows(split: Split, count: int) -> Iterator[str]:
        for index in range(count):
            word = words.task(split, index).question
            wrong = next(
                t for seed in range(9) if (t := words.script("", words.task(split, index), [], seed)) != word
            )
            yield json.dumps({"prompt": word, "chosen": word, "rejected": wrong}) + "\n"

    (tmp_path / "train.jsonl").write_text("".join(rows("train", 1000)))
    (tmp_path / "test.jsonl").write_text("".join(rows("test", 60)))
    run = Trainer(
        **sections(
            environment={"name": "preferences", "path": str(tmp_path)},
            workflow={"name": "solo"},
            algorithm={"name": "dpo", "data": "recorded", "beta": 0.5},
            team={"agents": 1, "lora": {"rank": 8, "alpha": 16.0}},
            model={"embedded": {**SIZE, "hidden": 32, "intermediate": 64}},
            training={"steps": 60, "tasks_per_step": 24},
            optimizer={"lr": 1e-2},
        )
    )
    before = held_out_accuracy(run)
    for _ in run.steps():
        pass
    assert before < 0.7
    assert held_out_accuracy(run) >= 0.9


def held_out_accuracy(run: Trainer) -> float:
    """Share of the test pairs whose chosen answer gained more than the rejected one, against the reference."""
    environment = cast("Preferences", run.setup.environment)
    setup = replace(run.setup, engine=teacher(run.config, run.team, run.models))
    tasks = [environment.task("test", index) for index in range(environment.size("test") or 0)]
    groups = run_async(lambda: rollout(setup, tasks, 2, 0))
    gains = []
    for name in ("agent_0", reference_name("agent_0")):
        samples = samples_for(Sampled(0, groups, run.team, lambda: groups), {"agent_0": name})
        gains.append([float(logp_T.sum()) for logp_T in run.engine.score(list(samples.values()))])
    ratio = [ours - theirs for ours, theirs in zip(*gains, strict=True)]
    ahead = [chosen > rejected for chosen, rejected in zip(ratio[::2], ratio[1::2], strict=True)]
    return ahead.count(True) / len(ahead)
