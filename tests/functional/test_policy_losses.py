"""Facts about policy losses: hand-computed values and gradients, both signs of every clip bound."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kapelle.functional import policy_losses
from kapelle.functional.policy_losses import SurrogateTerms

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def gradient(function: Callable[[Tensor], Tensor], *values: float) -> list[float]:
    x = tensor(*values).requires_grad_()
    (grad,) = torch.autograd.grad(function(x).sum(), x)
    return [round(value, 12) for value in grad.tolist()]


def ppo(ratio: float, advantage: float) -> SurrogateTerms:
    return policy_losses.clipped_surrogate(
        tensor(math.log(ratio)), tensor(advantage), clip_low=0.2, clip_high=0.3
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        # A > 0: the gain stops growing above 1.3 and still falls below 0.8.
        (1.5, 2.0, -2.6, 1.0),  # −min(3.0, 1.3·2)
        (1.2, 2.0, -2.4, 0.0),  # −min(2.4, 2.4)
        (0.5, 2.0, -1.0, 0.0),  # −min(1.0, 0.8·2)
        # A < 0: the gain stops growing below 0.8 and still falls above 1.3.
        (0.5, -2.0, 1.6, 1.0),  # −min(−1.0, −1.6)
        (0.9, -2.0, 1.8, 0.0),  # −min(−1.8, −1.8)
        (1.5, -2.0, 3.0, 0.0),  # −min(−3.0, −2.6)
        # No advantage, no loss, and nothing to clip.
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    result = ppo(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert result.clipped.item() == clipped


@pytest.mark.parametrize(("advantage", "bound", "inside"), [(2.0, 1.3, -1), (-2.0, 0.8, 1)])
def test_the_gradient_ends_exactly_at_the_bound(advantage: float, bound: float, inside: int) -> None:
    def surrogate(log_ratio: Tensor) -> Tensor:
        return policy_losses.clipped_surrogate(log_ratio, tensor(advantage), clip_low=0.2, clip_high=0.3).loss

    just_inside, just_outside = bound * (1 + inside * 1e-9), bound * (1 - inside * 1e-9)
    # d(−ρA)/d log ρ = −ρA inside, 0 outside.
    assert gradient(surrogate, math.log(just_inside)) == pytest.approx([-bound * advantage], rel=1e-8)
    assert gradient(surrogate, math.log(just_outside)) == [0.0]
    assert ppo(just_inside, advantage).clipped.item() == 0.0
    assert ppo(just_outside, advantage).clipped.item() == 1.0


def test_at_the_sampling_policy_the_gradient_is_that_of_reinforce() -> None:
    # ρ = 1: d(−ρA)/d logp = −A, that of −A·log π, whatever the bounds.
    def surrogate(logp: Tensor) -> Tensor:
        log_ratio = policy_losses.token_log_ratio(logp, tensor(-1.0, -2.0))
        return policy_losses.clipped_surrogate(log_ratio, tensor(0.5, -3.0), clip_low=0.2, clip_high=0.2).loss

    assert gradient(surrogate, -1.0, -2.0) == [-0.5, 3.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (2.5, -2.0, 5.0, 5.0, 0.0),  # −max(−5, −6): below the dual bound the loss is −ρA = 5
        (4.0, -2.0, 6.0, 0.0, 1.0),  # −max(−8, −6): bounded by 3·|A| = 6
        (4.0, 2.0, -2.6, 0.0, 1.0),  # A > 0 knows the upper bound only
        (0.5, -2.0, 1.6, 0.0, 1.0),  # the lower bound is still there
    ],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, loss: float, grad: float, clipped: float) -> None:
    def dual(log_ratio: Tensor) -> SurrogateTerms:
        return policy_losses.dual_clipped_surrogate(
            log_ratio, tensor(advantage), clip_low=0.2, clip_high=0.3, dual_clip=3.0
        )

    result = dual(tensor(math.log(ratio)))
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert result.clipped.item() == clipped
    assert gradient(lambda x: dual(x).loss, math.log(ratio)) == pytest.approx([grad], abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "taken"),
    [
        # τ = 2: at ρ = 1 the gate is half open, −(4/2)·½·A, and the gradient that of REINFORCE.
        (1.0, 3.0, -3.0, -3.0, 0.0),
        # σ(ln 3) = ¾ at ρ = 1 + ln(3)/2: −2·¾·3, and 4·¾·¼ = ¾ of the gradient −ρA is left.
        (1 + math.log(3) / 2, 3.0, -4.5, -0.75 * 3 * (1 + math.log(3) / 2), 0.25),
        # A ≤ 0 has τ = 4: σ(−ln 3) = ¼ at ρ = 1 − ln(3)/4.
        (1 - math.log(3) / 4, -2.0, 0.5, 0.75 * 2 * (1 - math.log(3) / 4), 0.25),
        (1.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_soft_gate_by_hand(
    ratio: float, advantage: float, loss: float, grad: float, taken: float
) -> None:
    def gated(log_ratio: Tensor) -> SurrogateTerms:
        return policy_losses.soft_gated_surrogate(
            log_ratio, tensor(advantage), tau_positive=2.0, tau_negative=4.0
        )

    result = gated(tensor(math.log(ratio)))
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert result.clipped.item() == pytest.approx(taken, abs=1e-12)
    assert gradient(lambda x: gated(x).loss, math.log(ratio)) == pytest.approx([grad], abs=1e-12)


def test_off_policy_masking_uses_the_mean_and_negative_advantages() -> None:
    # Mean log-ratios: (−0.1 − 0.2 − 0.6)/3 = −0.3, though one token has moved by 0.6, and +0.4.
    known = (BEHAVIOUR_K, LOGP_K, tensor(-1.0, 2.0, -1.0, -1.0), MASK_K, SEGMENT_K, 2)
    assert policy_losses.off_policy_mask(*known, threshold=0.31).tolist() == [False] * 4
    assert policy_losses.off_policy_mask(*known, threshold=0.29).tolist() == [True, False, True, False]
    # A masked token has no say: without the third the mean is −0.15.
    masked = (*known[:3], tensor(1.0, 1.0, 0.0, 1.0), *known[4:])
    assert policy_losses.off_policy_mask(*masked, threshold=0.29).tolist() == [False] * 4


@pytest.mark.parametrize("difference", [25.0, 1e4, math.inf])
def test_log_ratios_stop_at_twenty_nats(difference: float) -> None:
    logp, behaviour = tensor(0.0, -difference), tensor(-difference, 0.0)
    assert policy_losses.token_log_ratio(logp, behaviour).tolist() == [20.0, -20.0]
    ratio = policy_losses.turn_log_ratio(logp, behaviour, torch.ones(2), torch.tensor([0, 1]), 2)
    assert ratio.tolist() == [20.0, -20.0]


def test_no_gradient_reaches_the_sampler_or_the_advantage() -> None:
    behaviour, advantage = tensor(-1.0).requires_grad_(), tensor(2.0).requires_grad_()
    logp = tensor(-1.1).requires_grad_()
    segment, mask = torch.tensor([0]), torch.ones(1)
    ratios = [
        policy_losses.token_log_ratio(logp, behaviour),
        policy_losses.turn_log_ratio(logp, behaviour, mask, segment, 1),
        policy_losses.sequence_log_ratio(logp, behaviour, mask, segment, 1),
    ]
    for log_ratio in ratios:
        policy_losses.clipped_surrogate(log_ratio, advantage, clip_low=0.2, clip_high=0.2).loss.backward()
    assert logp.grad is not None
    assert behaviour.grad is None
    assert advantage.grad is None


# Two completions: three tokens whose log-ratios are 0.1, 0.2, 0.6 and one whose is −0.4.
LOGP_K = tensor(-1.0, -2.0, -0.5, -3.0)
BEHAVIOUR_K = LOGP_K - tensor(0.1, 0.2, 0.6, -0.4)
SEGMENT_K = torch.tensor([0, 0, 0, 1])
MASK_K = torch.ones(4)


def test_log_ratios_of_turns_and_sequences_by_hand() -> None:
    # Sums 0.9 and −0.4; means 0.3 and −0.4.
    turn_S = policy_losses.turn_log_ratio(LOGP_K, BEHAVIOUR_K, MASK_K, SEGMENT_K, 2)
    sequence_S = policy_losses.sequence_log_ratio(LOGP_K, BEHAVIOUR_K, MASK_K, SEGMENT_K, 2)
    torch.testing.assert_close(turn_S, tensor(0.9, -0.4))
    torch.testing.assert_close(sequence_S, tensor(0.3, -0.4))


def test_gradient_of_a_sequence_ratio_is_shared_by_its_tokens() -> None:
    # GSPO, A = 2 and −1: d(−sA)/dlogp_k = −s·A/|y| = −2·e^0.3/3 on three tokens and e^−0.4 on one.
    def gspo(logp_K: Tensor) -> Tensor:
        log_ratio_S = policy_losses.sequence_log_ratio(logp_K, BEHAVIOUR_K, MASK_K, SEGMENT_K, 2)
        return policy_losses.clipped_surrogate(log_ratio_S, tensor(2.0, -1.0), clip_low=9, clip_high=9).loss

    three, one = -2 * math.exp(0.3) / 3, math.exp(-0.4)
    assert gradient(gspo, *LOGP_K.tolist()) == pytest.approx([three, three, three, one], abs=1e-11)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.5, 2.0, 1.3, 1.0), (0.5, -2.0, 0.8, 1.0), (1.1, -2.0, 1.1, 0.0), (1.5, -2.0, 1.3, 1.0)],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: float
) -> None:
    # Loss −w·A·logp with w a constant: the gradient is −w·A on either side of the bounds.
    logp = tensor(-0.7).requires_grad_()
    log_ratio = policy_losses.token_log_ratio(logp, tensor(-0.7 - math.log(ratio)))
    result = policy_losses.cispo(logp, log_ratio, tensor(advantage), clip_low=0.2, clip_high=0.3)
    assert result.loss.item() == pytest.approx(0.7 * weight * advantage, abs=1e-12)
    assert result.clipped.item() == clipped
    (grad,) = torch.autograd.grad(result.loss.sum(), logp)
    assert grad.item() == pytest.approx(-weight * advantage, abs=1e-12)


def test_happo_with_two_agents_by_hand() -> None:
    # One round, Â = 2. Agent 1's ratio after its update is 1.5: M = 3. Agent 2 at ratio 1.4 with ε = 0.2
    # maximises min(1.4·3, 1.2·3) = 3.6. In a second round Â = −1 and agent 1 had no turn: M = −1, and
    # agent 2 at ratio 0.5 maximises min(−0.5, −0.8) = −0.8.
    advantage_S = tensor(2.0, -1.0)
    factor_S = policy_losses.happo_factor(
        advantage_S, tensor(math.log(1.5), 7.0), acted_S=torch.tensor([1, 0])
    )
    torch.testing.assert_close(factor_S, tensor(3.0, -1.0))
    log_ratio_S = tensor(math.log(1.4), math.log(0.5))
    result = policy_losses.clipped_surrogate(log_ratio_S, factor_S, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(result.loss, tensor(-3.6, 0.8))
    assert result.clipped.tolist() == [1.0, 1.0]


def test_the_factor_carries_no_gradient_and_never_overflows() -> None:
    log_ratio = tensor(1000.0).requires_grad_()
    factor = policy_losses.happo_factor(tensor(1.0), log_ratio, torch.ones(1))
    assert not factor.requires_grad
    assert factor.item() == pytest.approx(math.exp(20))


def test_the_plain_policy_gradient_by_hand() -> None:
    logp, behaviour, advantage = tensor(-0.5, -1.0, -2.0), tensor(-0.5, -1.5, -1.0), tensor(2.0, -1.0, 3.0)
    log_ratio = policy_losses.token_log_ratio(logp, behaviour)
    loss = policy_losses.policy_gradient(logp, log_ratio, advantage)
    assert loss.tolist() == pytest.approx([1.0, -math.exp(0.5), 6.0 * math.exp(-1.0)])

    def plain(x: Tensor) -> Tensor:
        return policy_losses.policy_gradient(x, policy_losses.token_log_ratio(x, behaviour), advantage)

    def unclipped(x: Tensor) -> Tensor:
        return -torch.exp(policy_losses.token_log_ratio(x, behaviour)) * advantage

    # d/d log π of −ρA is −ρA, and ρ is a weight here: both losses go the same way, though their values differ.
    expected = [-2.0, math.exp(0.5), -3.0 * math.exp(-1.0)]
    assert gradient(plain, *logp.tolist()) == pytest.approx(expected)
    assert gradient(unclipped, *logp.tolist()) == pytest.approx(expected)
