"""What one row samples: published random numbers, distributions by hand, and rows that ignore each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import tiny_model
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.sampling import (
    SamplingRows,
    adjusted,
    likeliest,
    processed_logits,
    sample,
    uniform,
)
from kapelle.types import Adjustments, Sampling

HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
"""Log-probs whose tempered and cut forms can be worked out by hand."""


def rows(
    count: int,
    temperature: float | list[float] = 1.0,
    top_p: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    seeds: list[int] | None = None,
) -> SamplingRows:
    def column(value: float | list[float]) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * count, dtype=torch.float32)

    k = top_k if isinstance(top_k, list) else [top_k] * count
    return SamplingRows(
        column(temperature), column(top_p), torch.tensor(k), torch.tensor(seeds or list(range(count)))
    )


def probabilities(logits: Tensor, **limits: float) -> list[float]:
    return [round(p, 6) for p in processed_logits(logits[None], rows(1, **limits))[0].softmax(-1).tolist()]  # type: ignore[arg-type]


class TestUniform:
    def test_is_splitmix64_with_its_published_first_outputs(self) -> None:
        published = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ]  # seed 1234567
        drawn = uniform(torch.full((5,), 1234567), torch.arange(5))
        assert drawn.tolist() == [(value >> 11) * 2.0**-53 for value in published]

    def test_is_even_over_positions_and_over_seeds(self) -> None:
        along = uniform(torch.full((20_000,), 7), torch.arange(20_000))
        across = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))
        for drawn in (along, across):
            assert float(drawn.min()) >= 0
            assert float(drawn.max()) < 1
            counts = torch.histc(drawn.float(), bins=10, min=0, max=1)
            # 2000 expected in each tenth, standard deviation 42.
            assert float((counts - 2000).abs().max()) < 200

    def test_takes_the_largest_seeds(self) -> None:
        seeds = torch.tensor([(1 << 63) - 1, -(1 << 63), -1, 0])
        drawn = uniform(seeds, torch.tensor([0, 1, 2, 3]))
        assert bool(((drawn >= 0) & (drawn < 1)).all())


class TestDistribution:
    def test_temperature_one_half_squares_the_odds(self) -> None:
        # 1/4, 1/16, 1/64, 1/64 over their sum 11/32
        assert probabilities(HALVES, temperature=0.5) == pytest.approx(
            [8 / 11, 2 / 11, 1 / 22, 1 / 22], abs=1e-5
        )

    def test_temperature_two_takes_the_root_of_the_odds(self) -> None:
        roots = [0.5**0.5, 0.5, 0.125**0.5, 0.125**0.5]
        assert probabilities(HALVES, temperature=2.0) == pytest.approx(
            [r / sum(roots) for r in roots], abs=1e-5
        )

    def test_top_k_two_keeps_the_two_likeliest(self) -> None:
        assert probabilities(HALVES, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-6)

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(0.4, [1, 0, 0, 0]), (0.6, [2 / 3, 1 / 3, 0, 0]), (0.8, [4 / 7, 2 / 7, 1 / 7, 0])],
    )
    def test_top_p_keeps_the_fewest_tokens_that_reach_it(self, top_p: float, kept: list[float]) -> None:
        assert probabilities(HALVES, top_p=top_p) == pytest.approx(kept, abs=1e-6)

    def test_top_p_applies_after_temperature_and_top_k(self) -> None:
        # top-k 3 leaves 4/7, 2/7, 1/7; the first two reach 0.8.
        assert probabilities(HALVES, top_k=3, top_p=0.8) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-6)

    def test_the_order_of_the_vocabulary_does_not_matter(self) -> None:
        mixed = HALVES[torch.tensor([3, 0, 2, 1])]
        assert probabilities(mixed, top_p=0.6) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=1e-6)


def by_sorting(logits_RV: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """The definition itself: rank by log-prob and id, keep k, rank again, keep while those before hold less than p."""
    found = []
    for logits_V, k, p in zip(logits_RV, top_k, top_p, strict=True):
        kept_V = logits_V
        if k > 0:
            logp_V = torch.log_softmax(kept_V, -1)
            kept_V = _only(logp_V, logp_V.argsort(descending=True, stable=True)[:k])
        if p < 1:
            logp_V = torch.log_softmax(kept_V, -1)
            order_V = logp_V.argsort(descending=True, stable=True)
            mass_V = logp_V[order_V].float().exp().double()
            before_V = mass_V.cumsum(-1) - mass_V
            kept_V = _only(logp_V, order_V[: max(1, int((before_V < p).sum()))])
        found.append(kept_V)
    return torch.stack(found)


def _only(logp_V: Tensor, kept: Tensor) -> Tensor:
    return torch.log_softmax(torch.full_like(logp_V, -torch.inf).index_copy(0, kept, logp_V[kept]), -1)


SHARES = [1e-6, 1e-3, 0.1, 0.25, 0.5, 0.9, 0.95, 0.999, 0.999999, 1 - 2**-24, 1.0]
"""Top-p as float32 has it: from almost nothing to all but the last bit."""


class TestCutsWithoutSorting:
    """What is kept is what the definition by a full ranking keeps, to the token, and its log-probs bitwise."""

    @pytest.mark.sample(6)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("grid", [None, 1.0, 0.25], ids=["distinct", "ties", "many-ties"])
    @pytest.mark.parametrize("words", [1, 3, 262, 4097, 9000])
    def test_the_same_tokens_stay(self, words: int, grid: float | None, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(words)
        top_p = torch.tensor(SHARES).tolist()
        for scale in (0.0, 0.5, 3.0, 10.0):
            logits = torch.randn(len(SHARES), words, generator=generator) * scale
            logits = (logits if grid is None else (logits / grid).round() * grid).to(dtype)
            for top_k in ([0] * 11, [40] * 11, [0, 1, 2, 5, words, 9 * words, 0, 300, 7, 0, 3]):
                kept = processed_logits(logits, rows(11, top_p=top_p, top_k=top_k))
                assert torch.equal(kept, by_sorting(logits, top_k, top_p))

    def test_equal_tokens_stay_in_the_order_of_their_ids(self) -> None:
        equal = torch.zeros(1, 8)
        assert processed_logits(equal, rows(1, top_k=3)).isfinite()[0].tolist() == [True] * 3 + [False] * 5
        assert processed_logits(equal, rows(1, top_p=0.5)).isfinite()[0].tolist() == [True] * 4 + [False] * 4

    def test_broken_logits_end_too(self) -> None:
        assert bool(processed_logits(torch.full((1, 5000), torch.nan), rows(1, top_p=0.5)).isnan().all())


class TestSample:
    def test_frequencies_are_the_probabilities(self) -> None:
        count = 40_000
        tokens, _ = sample(HALVES.expand(count, 4), rows(count), torch.zeros(count, dtype=torch.int64))
        shares = torch.bincount(tokens, minlength=4) / count
        assert shares.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.01)

    def test_excluded_tokens_are_never_sampled(self) -> None:
        count = 5_000
        limited = rows(count, top_k=2)
        tokens, logp = sample(HALVES.expand(count, 4), limited, torch.zeros(count, dtype=torch.int64))
        assert set(tokens.tolist()) == {0, 1}
        assert logp[tokens == 0][0].item() == pytest.approx(-0.405465, abs=1e-5)  # ln 2/3
        assert logp[tokens == 1][0].item() == pytest.approx(-1.098612, abs=1e-5)  # ln 1/3

    def test_greedy_takes_the_likeliest_at_its_untempered_log_prob(self) -> None:
        logits = torch.tensor([[0.0, 3.0, 1.0]])
        tokens, logp = sample(logits, rows(1, temperature=0.0), torch.zeros(1, dtype=torch.int64))
        assert tokens.tolist() == [1]
        assert logp.item() == pytest.approx(3 - torch.logsumexp(logits[0], 0).item(), abs=1e-6)

    def test_a_row_ignores_its_neighbours(self) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(16, 50, generator=generator)
        seeds = [3 * k + 1 for k in range(16)]
        place = torch.arange(16)
        together, _ = sample(logits, rows(16, seeds=seeds), place)
        alone = [
            int(sample(logits[k : k + 1], rows(1, seeds=[seeds[k]]), place[k : k + 1])[0]) for k in place
        ]
        assert together.tolist() == alone


class TestALargeVocabulary:
    """It is sampled block by block; 5,001 tokens are nine blocks and 393 tokens more."""

    SIZE = 5_001

    def test_tokens_have_their_probabilities(self) -> None:
        logits_V = torch.full((self.SIZE,), -torch.inf)
        logits_V[[3, 511, 512, 4_608, 5_000]] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).log()
        token_R, logp_R = sample(
            logits_V.expand(20_000, -1), rows(20_000), torch.zeros(20_000, dtype=torch.long)
        )
        share = token_R.bincount(minlength=self.SIZE) / 20_000
        torch.testing.assert_close(share, logits_V.exp(), atol=0.012, rtol=0.0)
        torch.testing.assert_close(logp_R, logits_V[token_R], atol=1e-6, rtol=0.0)


class TestAdjustments:
    LOGITS = torch.tensor([2.0, 1.0, -1.0, 0.0])

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"logit_bias": ((3, 5.0), (0, -1.0))}, [1.0, 1.0, -1.0, 5.0]),
            # The prompt is token 2, the completion tokens 0, 0 and 1.
            ({"repetition_penalty": 2.0}, [1.0, 0.5, -2.0, 0.0]),
            ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, [1.0, 0.25, -1.0, 0.0]),
            ({"min_tokens": 4}, [2.0, 1.0, -1.0, -torch.inf]),
            ({"min_tokens": 3}, [2.0, 1.0, -1.0, 0.0]),
            # At temperature 0.5 the odds to the likeliest are e^-2, e^-6 and e^-4.
            ({"min_p": 0.02}, [2.0, 1.0, -torch.inf, -torch.inf]),
        ],
    )
    def test_each_changes_the_logits_as_it_is_defined(self, change: Any, expected: list[float]) -> None:
        sampling = Sampling(temperature=0.5, adjusted=Adjustments(**change))
        ends = [3, 4]  # token 4 has no logit
        assert adjusted(self.LOGITS, sampling, [2], [0, 0, 1], ends).tolist() == expected

    def test_only_its_own_row_changes(self) -> None:
        """An adjusted row samples the biased token; the row beside it samples as it does alone."""
        model = tiny_model()
        forced = Sampling(max_tokens=4, adjusted=Adjustments(logit_bias=((7, 100.0),)))
        plain = Job(None, (1, 2, 3), Sampling(max_tokens=4), 5)
        [alone] = decode(model, [plain])
        first, second = decode(model, [plain._replace(sampling=forced), plain])
        assert first.ids == [7] * 4
        assert second.ids == alone.ids
        repeated = Sampling(
            max_tokens=3, adjusted=Adjustments(((7, 100.0), (8, 50.0)), presence_penalty=75.0)
        )
        [third] = decode(model, [plain._replace(sampling=repeated)])
        assert third.ids == [7, 8, 7], "the penalty is subtracted once a token"

    def test_alternatives_are_those_of_the_adjusted_distribution(self) -> None:
        sampling = Sampling(adjusted=Adjustments(((7, 100.0),), frequency_penalty=200.0))
        model = tiny_model()
        first, second = likeliest(model, None, (1, 2, 3), (7, 8), sampling, 1)
        assert first[0][0] == 7
        assert second[0][0] != 7
