"""The clipped surrogate and the value loss: each option by hand on five tokens of two turns."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.algorithms.a2c import a2c_loss
from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig

# Turn 0 has three tokens, turn 1 has two; the ratio π/π_b of each token:
RATIOS = [1.5, 0.5, 1.0, 1.1, 2.0]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0, -2.0]
SEGMENTS = [0, 0, 0, 1, 1]


def loss(
    mask: list[float] | None = None, entropy: Tensor | None = None, **settings: object
) -> tuple[Loss, Tensor]:
    """Loss of the five tokens, and its gradient by their log-probs."""
    behaviour = torch.full((5,), -1.0)
    logp = (behaviour + torch.tensor(RATIOS).log()).requires_grad_()
    columns = {"behaviour": behaviour, "advantage": torch.tensor(ADVANTAGES)}
    if settings.get("kl_coefficient"):
        columns["reference"] = logp.detach() + math.log(2.0)
    targets = Targets(torch.tensor(SEGMENTS), 2, torch.tensor(mask or [1.0] * 5), columns)
    found = SurrogateConfig.model_validate(settings).build()(Outputs(logp, entropy), targets)
    (gradient,) = torch.autograd.grad(found.total, logp)
    return found, gradient


class TestLevels:
    def test_token(self) -> None:
        found, gradient = loss()
        # −min(ρA, clip(ρ)A): −1.2 (clipped), −0.5, −1, +2.2, +4
        assert found.total.item() == pytest.approx(-1.2 - 0.5 - 1.0 + 2.2 + 4.0)
        assert float(found.weight) == 5.0
        assert gradient.tolist() == pytest.approx([0.0, -0.5, -1.0, 2.2, 4.0])

    def test_turn(self) -> None:
        found, gradient = loss(level="turn")
        # ρ = 0.75 and 2.2, once for each turn, however long it is
        assert found.total.item() == pytest.approx(-0.75 + 4.4)
        assert float(found.weight) == 2.0
        assert gradient.tolist() == pytest.approx([-0.75] * 3 + [4.4] * 2)

    def test_sequence(self) -> None:
        found, _ = loss(level="sequence")
        # ρ = 0.75^(1/3) and 2.2^(1/2), once per sequence
        assert found.total.item() == pytest.approx(-(0.75 ** (1 / 3)) + 2 * math.sqrt(2.2))
        assert float(found.weight) == 2.0

    @pytest.mark.parametrize("level", ["turn", "sequence"])
    @pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum"])
    def test_a_loss_of_a_whole_completion_is_not_counted_by_tokens(
        self, level: str, aggregation: str
    ) -> None:
        with pytest.raises(ValidationError, match="remove `aggregation`"):
            SurrogateConfig.model_validate({"level": level, "aggregation": aggregation})


class TestSamplerAndTrainer:
    """The trainer's log-probs before the update differ from the sampler's: by ln of these, token by token."""

    APART = (2.0, 0.25, 1.0, 3.0, 0.5)

    def weighed(self, **settings: object) -> Loss:
        """The loss on the trainer's own weights, ρ = 1 against them, with advantages of one."""
        behaviour = torch.full((5,), -4.0)
        proximal = behaviour + torch.tensor(self.APART).log()
        columns = {"behaviour": behaviour, "proximal": proximal, "advantage": torch.ones(5)}
        targets = Targets(torch.tensor(SEGMENTS), 2, torch.ones(5), columns)
        return SurrogateConfig.model_validate(settings).build()(Outputs(proximal), targets)

    def test_a_token_weighs_what_the_trainer_makes_of_it(self) -> None:
        found = self.weighed(importance_cap=2.0)
        assert found.total.item() == pytest.approx(-(2.0 + 0.25 + 1.0 + 2.0 + 0.5))

    @pytest.mark.parametrize("level", ["turn", "sequence"])
    def test_a_completion_weighs_as_one_action(self, level: str) -> None:
        found = self.weighed(level=level, importance_cap=1.25)
        # 2·¼·1 = ½ and 3·½ = 1.5, which the cap cuts.
        assert found.total.item() == pytest.approx(-(0.5 + 1.25))
        assert float(found.weight) == 2.0

    def test_outliers_leave_the_loss_and_its_weight(self) -> None:
        found = self.weighed(importance_range=[0.4, 2.5])
        # Without a cap ρ is against the sampler: 2 (cut at 1.2), 1 and ½; ¼ and 3 are out.
        assert found.total.item() == pytest.approx(-(1.2 + 1.0 + 0.5))
        assert float(found.weight) == 3.0
        total, weight = found.metrics["masked_share"]
        assert (float(total), float(weight)) == (2.0, 5.0)
        # The range is of trainer over sampler: up to 3.5 keeps 3 and leaves ¼ out.
        assert float(self.weighed(importance_range=[0.4, 3.5]).weight) == 4.0

    def test_an_importance_range_must_contain_1(self) -> None:
        with pytest.raises(ValidationError, match="importance_range"):
            SurrogateConfig(importance_range=(1.5, 2.0))
        with pytest.raises(ValidationError, match="masks single tokens"):
            SurrogateConfig(importance_range=(0.5, 2.0), level="turn")


class TestAggregation:
    def test_mean_of_each_sequence(self) -> None:
        found, _ = loss(aggregation="sequence_mean")
        assert found.total.item() == pytest.approx(-2.7 / 3 + 6.2 / 2)
        assert float(found.weight) == 2.0

    def test_sum_over_a_constant(self) -> None:
        found, _ = loss(aggregation="sequence_sum", constant=10)
        assert found.total.item() == pytest.approx((-2.7 + 6.2) / 10)
        assert float(found.weight) == 2.0

    def test_masked_tokens_have_no_part(self) -> None:
        found, gradient = loss(mask=[0.0, 1.0, 1.0, 0.0, 1.0])
        assert found.total.item() == pytest.approx(-1.5 + 4.0)
        assert float(found.weight) == 3.0
        assert gradient.tolist() == pytest.approx([0.0, -0.5, -1.0, 0.0, 4.0])


class TestOptions:
    def test_clip_higher(self) -> None:
        found, gradient = loss(clip_high=0.6)
        assert found.total.item() == pytest.approx(-1.5 - 0.5 - 1.0 + 2.2 + 4.0)
        assert gradient[0].item() == pytest.approx(-1.5)

    def test_dual_clip_bounds_the_loss_of_bad_tokens(self) -> None:
        found, gradient = loss(dual_clip=1.5)
        assert found.total.item() == pytest.approx(-1.2 - 0.5 - 1.0 + 2.2 + 3.0)
        assert gradient[4].item() == 0.0

    def test_a_soft_gate_takes_the_place_of_the_clip(self) -> None:
        found, gradient = loss(kind="sapo", tau_positive=2.0, tau_negative=4.0)
        open_share = [1 / (1 + math.exp(-t * (r - 1))) for t, r in zip([2, 2, 2, 4, 4], RATIOS, strict=True)]
        each = zip([2, 2, 2, 4, 4], open_share, ADVANTAGES, strict=True)
        assert found.total.item() == pytest.approx(sum(-4 / t * s * a for t, s, a in each), abs=1e-5)
        terms = zip(open_share, RATIOS, ADVANTAGES, strict=True)
        assert gradient.tolist() == pytest.approx([-4 * s * (1 - s) * r * a for s, r, a in terms], abs=1e-5)
        total, weight = found.metrics["clip_share"]
        assert float(total / weight) == pytest.approx(
            sum(1 - 4 * s * (1 - s) for s in open_share) / 5, abs=1e-5
        )

    def test_a_token_whose_probability_has_moved_too_far_is_dropped(self) -> None:
        # π_b = 1/e = 0.368; π is 0.552, 0.184, 0.368, 0.405 and 0.736. Towards its advantage the first one has moved by 0.184, too
        # far for 0.15; the last one has moved twice as far against it, and is kept.
        found, gradient = loss(kind="dppo")
        assert found.total.item() == pytest.approx(0.0 - 0.5 - 1.0 + 2.2 + 4.0)
        assert gradient.tolist() == pytest.approx([0.0, -0.5, -1.0, 2.2, 4.0])
        assert float(found.weight) == 5.0
        total, weight = found.metrics["clip_share"]
        assert (float(total), float(weight)) == (1.0, 5.0)
        wider, gradient = loss(kind="dppo", divergence=0.19)
        assert wider.total.item() == pytest.approx(-1.5 - 0.5 - 1.0 + 2.2 + 4.0)
        assert gradient[0].item() == pytest.approx(-1.5)

    @pytest.mark.parametrize(("advantage", "kept"), [(1.0, True), (-1.0, False), (0.0, True)])
    def test_a_rare_token_may_change_its_ratio_and_a_frequent_one_may_not(
        self, advantage: float, kept: bool
    ) -> None:
        # From 0.9 to 0.7 the ratio is 0.78, inside PPO's range of negative advantages; from 0.001 to 0.01 it is 10.
        def gradient_at(before: float, after: float) -> float:
            logp = torch.tensor([math.log(after)], requires_grad=True)
            columns = {
                "behaviour": torch.tensor([math.log(before)]),
                "advantage": torch.tensor([advantage]),
            }
            targets = Targets(torch.tensor([0]), 1, torch.ones(1), columns)
            found = SurrogateConfig(kind="dppo").build()(Outputs(logp), targets)
            return float(torch.autograd.grad(found.total, logp)[0])

        assert gradient_at(0.9, 0.7) == pytest.approx(-advantage * 7 / 9 * kept)
        assert gradient_at(0.001, 0.01) == pytest.approx(-advantage * 10, rel=1e-4)

    def test_off_policy_completions_with_negative_advantage_are_masked(self) -> None:
        # Turn 1 has A < 0; its mean log-ratio is (ln ½ + ln 0.8)/2 = −0.458, that of turn 0 with A > 0 is lower still.
        settings = {"sequence_mask": 0.45, "kl_coefficient": 0.1, "kl_estimator": "k2"}
        # Two more tokens of it are no part of the loss.
        ratios = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.8, 1.0, 1.0])
        logp = (ratios.log() - 1.0).requires_grad_()
        columns = {
            "behaviour": torch.full((7,), -1.0),
            "advantage": torch.tensor([*ADVANTAGES, -2.0, -2.0]),
            "reference": logp.detach() + 1.0,
        }
        targets = Targets(torch.tensor([*SEGMENTS, 1, 1]), 2, torch.tensor([1.0] * 5 + [0.0] * 2), columns)
        found = SurrogateConfig.model_validate(settings).build()(Outputs(logp), targets)
        # It keeps its weight and its penalty, ½·0.1 a token.
        assert found.total.item() == pytest.approx(-1.5 + 5 * 0.05)
        assert float(found.weight) == 5.0
        total, weight = found.metrics["sequence_masked_share"]
        assert (float(total), float(weight)) == (2.0, 5.0)
        near = SurrogateConfig.model_validate({**settings, "sequence_mask": 0.47}).build()(
            Outputs(logp), targets
        )
        # −min(ρA, clip(ρ)A) with A = −2: 0.8 both.
        assert near.total.item() == pytest.approx(-1.5 + 1.6 + 1.6 + 5 * 0.05)

    @pytest.mark.parametrize(
        ("settings", "mending"),
        [
            ({"kind": "sapo", "level": "turn"}, "level: token"),
            ({"kind": "sapo", "clip_high": 0.28}, "clip_high"),
            ({"kind": "sapo", "dual_clip": 3.0}, "dual_clip"),
            ({"tau_negative": 2.0}, "tau_negative"),
            ({"kind": "dppo", "level": "turn"}, "level: token"),
            ({"kind": "dppo", "clip_high": 0.28}, "kind: clipped"),
            ({"divergence": 0.1}, "kind: dppo"),
            ({"sequence_mask": 0.0}, "greater than 0"),
        ],
    )
    def test_inconsistent_settings_raise_an_error(self, settings: dict[str, object], mending: str) -> None:
        with pytest.raises(ValidationError, match=mending):
            SurrogateConfig.model_validate(settings)

    @pytest.mark.parametrize("settings", [{"kind": "sapo"}, {"kind": "dppo"}, {"sequence_mask": 0.5}])
    def test_settings_that_a_run_has_kept_are_read_again(self, settings: dict[str, object]) -> None:
        given = SurrogateConfig.model_validate(settings)
        assert SurrogateConfig.model_validate(given.model_dump()) == given

    def test_a_penalty_to_the_reference(self) -> None:
        # log π_ref − log π = ln 2: k2 = ½ ln²2, k3 = 2 − ln 2 − 1
        for kind, each in (("k2", 0.5 * math.log(2) ** 2), ("k3", 1 - math.log(2))):
            found, _ = loss(kl_coefficient=0.1, kl_estimator=kind)
            assert found.total.item() == pytest.approx(3.5 + 0.5 * each)
            total, weight = found.metrics["kl"]
            assert float(total / weight) == pytest.approx(each)

    def test_an_entropy_bonus(self) -> None:
        found, _ = loss(entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), entropy_coefficient=0.1)
        assert found.total.item() == pytest.approx(3.5 - 1.5)

    @pytest.mark.parametrize(("done", "bonus"), [(0.0, 0.1), (0.25, 0.175), (1.0, 0.4), (1.5, 0.4)])
    def test_an_entropy_bonus_goes_to_its_end_in_a_straight_line(self, done: float, bonus: float) -> None:
        annealed = SurrogateConfig(entropy_coefficient=0.1, entropy_end=0.4).annealed
        assert annealed is not None
        known = Targets(
            torch.zeros(2, dtype=torch.int64),
            1,
            torch.ones(2),
            {"behaviour": torch.zeros(2), "advantage": torch.zeros(2)},
        )
        found = annealed(done)(Outputs(torch.zeros(2), torch.tensor([1.0, 3.0])), known)
        assert found.total.item() == pytest.approx(-4.0 * bonus)

    def test_metrics_say_how_much_was_clipped_and_how_far_it_drifted(self) -> None:
        found, _ = loss()
        total, weight = found.metrics["clip_share"]
        assert float(total / weight) == pytest.approx(0.2)
        # k3 of the behaviour policy: ρ − 1 − ln ρ
        total, weight = found.metrics["drift"]
        assert float(total) == pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS), abs=1e-5)
        assert not any(part.requires_grad for pair in found.metrics.values() for part in pair)

    def test_metrics_leave_out_what_is_masked(self) -> None:
        found, _ = loss(mask=[0.0, 1.0, 1.0, 1.0, 1.0], kl_coefficient=0.1, kl_estimator="k3")
        shares = {name: float(total / weight) for name, (total, weight) in found.metrics.items()}
        # The reference has twice the probability of each token: 2 − ln 2 − 1. Only the first token was clipped.
        assert shares["kl"] == pytest.approx(1.0 - math.log(2.0))
        assert shares["clip_share"] == 0.0
        assert shares["drift"] == pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS[1:]) / 4, abs=1e-6)


class TestValueLoss:
    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            # V = 3, 0; V_b = 0, 0; R = 1, 0.5; errors 2 and −0.5
            ({}, 0.5 * 4 + 0.5 * 0.25),
            ({"huber": 1.0}, (2 - 0.5) + 0.5 * 0.25),
            # V_clip = 0.2, 0: errors −0.8 and −0.5; the larger loss counts
            ({"clip": 0.2}, 0.5 * 4 + 0.5 * 0.25),
            ({"clip": 0.2, "huber": 0.1}, 0.1 * (2 - 0.05) + 0.1 * (0.5 - 0.05)),
        ],
    )
    def test_by_hand(self, settings: dict[str, float], expected: float) -> None:
        columns = {"return": torch.tensor([1.0, 0.5]), "value": torch.zeros(2)}
        targets = Targets(torch.tensor([0, 0]), 1, torch.ones(2), columns)
        value = torch.tensor([3.0, 0.0], requires_grad=True)
        found = ValueLossConfig.model_validate(settings).build()(value, targets)
        assert found.total.item() == pytest.approx(expected)
        assert float(found.weight) == 2.0
        total, weight = found.metrics["value_error"]
        assert float(total / weight) == pytest.approx(1.25)


def test_a2c_by_hand() -> None:
    """−ρA·log π − c·entropy with a constant ρ, and the drift ρ − 1 − log ρ."""
    ratio, advantage = torch.tensor(RATIOS), torch.tensor(ADVANTAGES)
    logp, entropy = (ratio.log() - 1.0).requires_grad_(), torch.arange(5.0).requires_grad_()
    columns = {"behaviour": torch.full((5,), -1.0), "advantage": advantage}
    targets = Targets(torch.tensor(SEGMENTS), 2, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), columns)
    found = a2c_loss(Outputs(logp, entropy), targets, entropy_coefficient=0.3)
    expected = -(ratio * advantage * logp + 0.3 * entropy)[:4].sum()
    assert found.total.item() == pytest.approx(float(expected.detach()))
    by_logp, by_entropy = torch.autograd.grad(found.total, (logp, entropy))
    assert by_logp.tolist() == pytest.approx([-1.5, -0.5, -1.0, 2.2, 0.0])
    assert by_entropy.tolist() == pytest.approx([-0.3] * 4 + [0.0])
    total, weight = found.metrics["drift"]
    assert float(weight) == float(found.weight) == 4.0
    assert total.item() == pytest.approx(sum(r - 1.0 - math.log(r) for r in RATIOS[:4]), abs=1e-6)
