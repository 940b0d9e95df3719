"""What one row samples: published random numbers, distributions by hand, and rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kapelle.engines.rollout.local.sampling import SamplingRows, processed_logits, sample, uniform

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

    def test_top_k_beyond_the_vocabulary_keeps_all(self) -> None:
        assert probabilities(HALVES, top_k=50) == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-6)

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(0.4, [1, 0, 0, 0]), (0.6, [2 / 3, 1 / 3, 0, 0]), (0.8, [4 / 7, 2 / 7, 1 / 7, 0])],
    )
    def test_top_p_keeps_the_fewest_tokens_that_reach_it(self, top_p: float, kept: list[float]) -> None:
        assert probabilities(HALVES, top_p=top_p) == pytest.approx(kept, abs=1e-6)

    def test_top_p_cuts_what_temperature_and_top_k_left(self) -> None:
        # top-k 3 leaves 4/7, 2/7, 1/7; the first two reach 0.8.
        assert probabilities(HALVES, top_k=3, top_p=0.8) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-6)

    def test_the_order_of_the_vocabulary_does_not_matter(self) -> None:
        mixed = HALVES[torch.tensor([3, 0, 2, 1])]
        assert probabilities(mixed, top_p=0.6) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=1e-6)

    def test_a_row_without_limits_is_untouched_beside_one_with_limits(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, 5000, generator=generator) * 6
        alone = processed_logits(logits[:1], rows(1)).log_softmax(-1)
        beside = processed_logits(logits, rows(2, top_p=[1.0, 0.5], top_k=[0, 3])).log_softmax(-1)
        assert torch.equal(torch.isneginf(beside[0]), torch.isneginf(alone[0]))
        assert float((beside[0] - alone[0]).abs().max()) < 1e-5


class TestSample:
    def test_frequencies_are_the_probabilities(self) -> None:
        count = 40_000
        tokens, _ = sample(HALVES.expand(count, 4), rows(count), torch.zeros(count, dtype=torch.int64))
        shares = torch.bincount(tokens, minlength=4) / count
        assert shares.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.01)

    def test_what_is_cut_is_never_sampled(self) -> None:
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

    def test_another_seed_or_position_draws_another_token(self) -> None:
        flat = torch.zeros(1, 1000)
        drawn = {
            int(sample(flat, rows(1, seeds=[seed]), torch.tensor([place]))[0])
            for seed in range(10)
            for place in range(10)
        }
        assert len(drawn) > 85
