"""Where trainer and sampler disagree, float64 says who is off and whether rounding explains it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.engines.train.torch.test_engine import CLIPPED, VALUES, logp_alone
from tests.support.tiny import (
    draw_samples,
    frozen_copy,
    lora_policies,
    model_of,
    same_bits,
    stir,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train import parity
from kapelle.engines.train.parity import exact_logprobs
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.sharing import Gaps, means
from kapelle.errors import ParityError
from kapelle.models.fast import fused
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.types import Sampling

OBJECTIVE = Objective(CLIPPED, VALUES)


def by_transformers(engine: TorchTrainEngine, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as if another right float32 pass had sampled them, the one of `transformers`."""
    model = model_of(engine, "a")
    with torch.no_grad():
        return with_columns(samples, behaviour=[logp_alone(model, s, s.learner) for s in samples])


def grown(bound: float | None = None) -> tuple[TorchTrainEngine, list[Sample]]:
    """An adapter that has grown until some tokens hang on sums whose terms nearly cancel, and what it said."""
    engine = train_engine(lora_policies("a"), limits=UpdateLimits(parity_tolerance=bound))
    stir(engine.weights("a"), 0, 8.0)
    return engine, with_columns(draw_samples(["a"], [(8, 6)] * 60), behaviour=grown_said())


@cache
def grown_said() -> list[Tensor]:
    engine = train_engine(lora_policies("a"))
    stir(engine.weights("a"), 0, 8.0)
    samples = by_transformers(engine, draw_samples(["a"], [(8, 6)] * 60))
    return [each.columns["behaviour"] for each in samples]


def gaps(engine: TorchTrainEngine, samples: Sequence[Sample]) -> Tensor:
    scored = engine.score(samples)
    return torch.cat([(s - each.columns["behaviour"]).abs() for s, each in zip(scored, samples, strict=True)])


class TestFloat64:
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize("adapter", ["a", None])
    def test_it_equals_transformers_with_the_same_weights_in_float64(
        self, adapter: str | None, temperature: float
    ) -> None:
        model = model_of(train_engine(lora_policies("a", "b")), "a")
        [sample] = draw_samples(["a"], [(9, 5)], temperature=temperature)
        exact = exact_logprobs(model, adapter, sample.tokens, sample.targets, temperature)
        wide = copy.deepcopy(model)
        wide.model.double()
        with torch.no_grad():
            expected = logp_alone(wide, sample, adapter)
        assert exact.dtype == expected.dtype == torch.float64
        # The norms of transformers round to float32 whatever they are given: each moves all logits by about one rounding.
        norms = sum("norm" in name for name, _ in model.model.named_modules())
        bound = norms * torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert float((exact - expected).abs().max()) < bound < 1e-5
        assert {p.dtype for p in model.model.parameters()} == {torch.float32}

    def test_a_program_that_lets_torch_multiply_in_bfloat16_trains_in_float32(self) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            engine = train_engine(lora_policies("a"))
            [sample] = draw_samples(["a"], [(9, 5)])
            exact = exact_logprobs(model_of(engine, "a"), "a", sample.tokens, sample.targets, 1.0)
            assert float((engine.score([sample])[0] - exact).abs().max()) < 1e-5
        finally:
            torch.set_float32_matmul_precision(before)


class TestWhatRoundingExplains:
    def test_a_difference_between_two_correct_passes_does_not_stop_the_run(self) -> None:
        engine, samples = grown(bound=1.0)
        found = engine.update(samples, OBJECTIVE)
        assert found["parity/mean"] < found["parity/max"] / 30
        engine, samples = grown(bound=found["parity/max"] / 2)
        before = frozen_copy(engine.weights("a"))
        row = engine.update(samples, OBJECTIVE)
        assert row["parity/max"] == found["parity/max"]
        assert 1 <= row["parity/rounded"] <= 3
        assert not same_bits(frozen_copy(engine.weights("a")), before)

    def test_an_error_as_small_as_that_gap_is_distinguished_from_it(self) -> None:
        engine, samples = grown()
        apart = gaps(engine, samples)
        bound = float(apart.max()) / 2
        at = int(apart.argmin())
        columns = [s.columns["behaviour"].clone() for s in samples]
        columns[at // 6][at % 6] -= 2 * bound
        engine, _ = grown(bound)
        before = frozen_copy(engine.weights("a"))
        with pytest.raises(ParityError, match=r"the sampler is off by .* sampled with other weights"):
            engine.update(with_columns(samples, behaviour=columns), OBJECTIVE)
        assert same_bits(frozen_copy(engine.weights("a")), before)


class TestDivergence:
    def test_exploded_weights_are_the_reason_and_no_sampler(self) -> None:
        """Tokens that are too many are rejected, although rounding explains each."""
        engine, samples = grown()
        bound = float(gaps(engine, samples).quantile(0.97))
        engine, _ = grown(bound)
        with pytest.raises(
            ParityError, match=r"^The weights of policy 'a' diverge: .*lower `optimizer.lr`"
        ) as said:
            engine.update(samples, OBJECTIVE)
        assert re.search(r"\d+ of 360 tokens .* the weights have grown", str(said.value))

    def test_another_adapter_is_the_reason_even_if_weights_have_exploded(self) -> None:
        engine, samples = grown()
        base = by_transformers(train_engine(lora_policies("a"), stirred=False), samples)
        with pytest.raises(ParityError, match=r"^Trainer and sampler .*sampled with other weights"):
            engine.update(base, OBJECTIVE)


class TestFaults:
    @pytest.mark.slow
    def test_one_row_in_a_thousand_that_another_adapter_sampled_is_named(self) -> None:
        engine = train_engine(lora_policies("a", "b"))
        samples = draw_samples(["a"], [(3, 2)] * 998) + draw_samples(["b"], [(3, 2)] * 2, seed=5)
        good = with_behaviour(engine, samples)
        engine.update(good, Objective(CLIPPED, VALUES))
        good = with_behaviour(engine, samples)
        model = model_of(engine, "b")
        with torch.no_grad():
            ignored = logp_alone(model, samples[-1], None)
        columns = [s.columns["behaviour"] for s in good[:-1]] + [ignored]
        with pytest.raises(
            ParityError, match=r"[12] of 2000 tokens .*policy 'b'.*sampled with other weights"
        ):
            engine.update(with_columns(good, behaviour=columns), OBJECTIVE)

    def test_of_an_architecture_without_a_float64_pass_every_gap_is_rejected(self) -> None:
        engine = train_engine(lora_policies("a"))
        samples = with_behaviour(engine, draw_samples(["a"], [(4, 3)]))
        wrong = with_columns(samples, behaviour=[s.columns["behaviour"] + 1e-3 for s in samples])
        model_of(engine, "a").flat = None
        with pytest.raises(ParityError, match="no float64 pass"):
            engine.check_parity(wrong)


HEALTHY = {
    # Largest of a million about 1 nat, as bfloat16 runs of large models show; the last one has a heavier tail.
    "t4, mean 0.011": (4.0, 0.011),
    "t4, mean 0.02": (4.0, 0.02),
    "t3, mean 0.011": (3.0, 0.011),
}


def rounding(kind: str, rows: int, tokens: int, seed: int) -> Tensor:
    """Gaps as rounding makes them: Student's t, of rows that are harder or easier to compute than others."""
    freedom, mean = HEALTHY[kind]
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows * tokens, 1 + int(freedom), generator=generator)
    gap_K = normal[:, 0].abs() / normal[:, 1:].square().mean(1).sqrt()
    scale_S = (0.4 * torch.randn(rows, generator=generator) - 0.08).exp()
    usual = {3.0: 1.1027, 4.0: 1.0}[freedom]  # E|t|
    return gap_K * scale_S.repeat_interleave(tokens) * mean / usual


def step_of(gap_K: Tensor, rows: int, learners: Sequence[str] | None = None) -> float:
    sample_K = torch.arange(rows).repeat_interleave(len(gap_K) // rows)
    return parity.improbability_of_step(gap_K, sample_K, learners or ["a"] * rows, BOUND)


BOUND = parity.PARITY[torch.bfloat16]


class TestWhatRoundingMakes:
    @pytest.mark.parametrize("kind", HEALTHY)
    @pytest.mark.parametrize(("rows", "tokens"), [(10, 100), (100, 10), (1, 1000), (500, 200), (512, 2048)])
    def test_it_is_never_suspect_however_long_the_step(self, kind: str, rows: int, tokens: int) -> None:
        long = rows * tokens > 1e5
        for seed in range(1 if long else 5):
            gap_K = rounding(kind, rows, tokens, seed)
            assert step_of(gap_K, rows) > 0.5
            assert not long or float(gap_K.max()) > 2 * BOUND, "its largest gap alone would stop it"

    @pytest.mark.parametrize("tokens", [10**3, 10**4, 10**5, 10**6])
    def test_a_false_alarm_is_rarer_than_one_in_a_million_steps(self, tokens: int) -> None:
        """For gaps 0.02·t₄, by the exact tail: P(|t₄| > x) = 1 − u(3 − u²)/2 with u = x/√(4 + x²)."""
        chance = 0.0
        for doubling in range(parity.DOUBLINGS):
            x = torch.tensor(BOUND * 2**doubling / 0.02, dtype=torch.float64)
            u = x / (4 + x * x).sqrt()
            tail = float((1 - u) ** 2 * (2 + u) / 2)
            count, allowed = torch.arange(1.0, 10_000).double(), tokens * parity.TAIL / 8**doubling
            refused = parity.DOUBLINGS * torch.special.gammainc(count, torch.tensor(allowed).double())
            fewest = count[refused < parity.CERTAIN][0]
            chance += float(torch.special.gammainc(fewest, torch.tensor(tokens * tail).double()))
        # The mean: Bernstein's bound for gaps whose mean is 0.02 and mean square 0.02² · E t₄² = 0.0008.
        over = tokens * (parity.MEAN * BOUND - 0.02)
        chance += math.exp(-(over**2) / (2 * (tokens * 8e-4 + BOUND * over / 3)))
        assert chance < 1e-6

    def test_one_sample_or_one_learner_of_many_is_not_diluted(self) -> None:
        gap_K = rounding("t4, mean 0.011", 500, 200, 1)
        one_row = gap_K.clone()
        one_row[4000:4200:3] += 0.3
        assert step_of(one_row, 500) < parity.CERTAIN
        assert float(one_row.mean()) < 0.013
        assert int((one_row > BOUND).sum()) < parity.TAIL * len(one_row)
        one_learner = gap_K.clone()
        one_learner[:4000] += 0.08
        learners = ["a"] * 20 + ["b"] * 480
        assert step_of(one_learner, 500, learners) < parity.CERTAIN
        assert step_of(one_learner, 500, ["a", "b"] * 250) > parity.SUSPECT

    def test_a_learner_below_the_limit_is_investigated_independently_of_others(self) -> None:
        samples = draw_samples(["a"], [(2, 40)] * 20) + draw_samples(["b"], [(2, 40)] * 400)
        gaps = [
            Gaps("a", torch.full((800,), 0.1), tuple(range(20))),
            Gaps("b", torch.full((16000,), 0.005), tuple(range(20, 420))),
        ]
        model = tiny_model(dtype="bfloat16")
        model.flat = None
        models: dict[str, tuple[LanguageModel, str | None]] = dict.fromkeys("ab", (model, None))
        with pytest.raises(ParityError, match="rounding does not explain"):
            parity.check_parity(gaps, samples, torch.bfloat16, BOUND, {}, models)
        gaps[0] = Gaps("a", torch.full((800,), 0.005), gaps[0].samples)
        totals: dict[str, list[float]] = {}
        parity.check_parity(gaps, samples, torch.bfloat16, BOUND, totals, models)
        assert totals["parity/max"][0] == pytest.approx(0.005)

    def test_kl_is_reported_by_the_tokens_of_context(self) -> None:
        """For d = ln 2 it is 1 − ln 2 = 0.306853, for d = −ln 2 it is ln 2 − 1/2 = 0.193147."""
        long = Sample("a", (0,) * 2049, (1, 127, 128, 600, 2048), mask=torch.tensor([1.0, 1, 1, 0, 1]))
        gaps = [
            Gaps("a", math.log(2) * torch.tensor([1.0, -1, -1, 0]), (0,)),
            Gaps("a", math.log(2) * torch.tensor([1.0]), (1,)),
        ]
        totals: dict[str, list[float]] = {}
        parity.check_parity(gaps, [long, Sample("a", (0,) * 6, (5,))], torch.float32, 1.0, totals, {})
        assert {name: value for name, value in means(totals).items() if "/kl/" in name} == pytest.approx(
            {"parity/kl/0-127": 0.268951, "parity/kl/128-511": 0.193147, "parity/kl/2048-": 0.0}, abs=1e-6
        )


@pytest.fixture(scope="module")
def half() -> tuple[TorchTrainEngine, Callable[..., list[Sample]]]:
    """A bfloat16 engine with two adapters, and what samples with it."""
    model = tiny_model(dtype="bfloat16", size=0.2)
    engine = train_engine(lora_policies("a", "b"), models={"base": model})
    for seed, name in enumerate("ab"):
        stir(engine.weights(name), seed, 0.2)

    def sampled(adapter: str | None = "a", temperature: float = 1.0) -> list[Sample]:
        """Tokens and log-probs of the sampler's own pass, in a step that says adapter `a` at temperature 1."""
        jobs = [
            Job(adapter, tuple(range(7 + k, 15 + k)), Sampling(max_tokens=40, temperature=temperature), k)
            for k in range(48)
        ]
        return [
            Sample(
                "a",
                (*job.prompt, *output.ids),
                tuple(range(len(job.prompt), len(job.prompt) + len(output.ids))),
                {"advantage": torch.ones(len(output.ids)), "behaviour": torch.tensor(output.logprobs)},
            )
            for job, output in zip(jobs, decode(model, jobs), strict=True)
        ]

    return engine, sampled


def by_another_pass(engine: TorchTrainEngine, samples: Sequence[Sample], stride: int = 1) -> list[Sample]:
    """The samples as if bfloat16 of `transformers` had sampled them, at every `stride`th position."""
    model, columns = model_of(engine, "a"), []
    with torch.no_grad(), model.bank.routed([("a", 0, 1)]), torch.autocast("cpu", torch.bfloat16):
        for sample in samples:
            tokens = torch.tensor([sample.tokens])
            places = stride * torch.arange(tokens.shape[1])[None]
            logits = model.model(input_ids=tokens, position_ids=places, use_cache=False).logits[0]
            logp_LV, targets = logits.float().log_softmax(-1), torch.tensor(sample.targets)
            columns.append(logp_LV[targets - 1].gather(1, tokens[0][targets][:, None])[:, 0])
    return with_columns(samples, behaviour=columns)


Half = tuple[TorchTrainEngine, "Callable[..., list[Sample]]"]


class TestFaultsInHalfPrecision:
    @pytest.fixture(autouse=True)
    def _pass_of_real_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused, "LARGEST", 0)

    def refused(self, engine: TorchTrainEngine, samples: Sequence[Sample]) -> None:
        with pytest.raises(ParityError, match=r"the sampler is off by .* sampled with other weights"):
            engine.check_parity(samples)

    def test_what_the_same_weights_sampled_passes(self, half: Half) -> None:
        """By our own pass, and by that of `transformers`, which rounds in other places."""
        engine, sampled = half
        samples = sampled()
        for each, least in ((samples, 0.0), (by_another_pass(engine, samples), 1e-3)):
            found = engine.check_parity(each)
            assert least <= found["parity/mean"] < parity.MEAN * BOUND
            assert "parity/rounded" not in found

    def test_a_token_above_the_bound_is_rounding_and_costs_no_pass(
        self, half: Half, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, sampled = half
        samples = sampled()
        samples[3].columns["behaviour"][5] -= 0.6
        monkeypatch.setattr(parity, "judge_in_float64", None)
        found = engine.check_parity(samples)
        assert found["parity/rounded"] == 1
        assert found["parity/max"] > 2 * BOUND

    @pytest.mark.slow
    @pytest.mark.sample(4)
    @pytest.mark.parametrize(
        "other", [{"adapter": "b"}, {"adapter": None}, {"temperature": 0.8}, {"temperature": 0.9}], ids=str
    )
    def test_another_adapter_or_temperature_is_caught(self, half: Half, other: dict[str, Any]) -> None:
        engine, sampled = half
        self.refused(engine, sampled(**other))
