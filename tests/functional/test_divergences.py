"""Facts about log-probs, entropy and divergence estimators."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kapelle.functional import divergences

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_estimators_by_hand() -> None:
    # log π = −1, log π_ref = −1.5: k1 = 0.5, k2 = 0.125, k3 = e^−0.5 + 0.5 − 1 = 0.10653066.
    logp, reference = tensor(-1.0), tensor(-1.5)
    assert divergences.kl_k1(logp, reference).item() == 0.5
    assert divergences.kl_k2(logp, reference).item() == 0.125
    assert divergences.kl_k3(logp, reference).item() == pytest.approx(0.1065306597126334, abs=1e-15)


def test_gradients_by_hand() -> None:
    # dk1 = 1; dk2 = log π − log π_ref = 0.5; dk3 = 1 − e^−0.5 = 0.39346934.
    for function, expected in (
        (divergences.kl_k1, 1.0),
        (divergences.kl_k2, 0.5),
        (divergences.kl_k3, 0.3934693402873666),
    ):
        logp = tensor(-1.0).requires_grad_()
        (grad,) = torch.autograd.grad(function(logp, tensor(-1.5)).sum(), logp)
        assert grad.item() == pytest.approx(expected, abs=1e-15)


def test_expectations_over_a_categorical() -> None:
    # π = (0.7, 0.2, 0.1), π_ref = (0.5, 0.3, 0.2):
    # KL = 0.7·ln 1.4 + 0.2·ln(2/3) + 0.1·ln 0.5 = 0.2355306 − 0.0810930 − 0.0693147 = 0.0851228.
    pi, reference = tensor(0.7, 0.2, 0.1), tensor(0.5, 0.3, 0.2)
    kl = 0.7 * math.log(1.4) + 0.2 * math.log(2 / 3) + 0.1 * math.log(0.5)
    for function in (divergences.kl_k1, divergences.kl_k3):
        assert (pi * function(pi.log(), reference.log())).sum().item() == pytest.approx(kl, abs=1e-15)


def test_as_losses_k2_and_k3_pull_to_the_reference_and_k1_does_nothing() -> None:
    # Over logits z of π: d KL/dz_i = π_i(log(π_i/ref_i) − KL). The expected gradient of k2 at fixed samples
    # is exactly this; that of k1 is Σ_i π_i·dlog π_i/dz = 0; that of k3 is d KL(ref‖π)/dz = π − ref.
    pi, reference = tensor(0.7, 0.2, 0.1), tensor(0.5, 0.3, 0.2)
    log_ratio = (pi / reference).log()
    true = pi * (log_ratio - (pi * log_ratio).sum())

    def expected_gradient(function: object) -> Tensor:
        assert callable(function)
        z = pi.log().requires_grad_()
        (grad,) = torch.autograd.grad((pi * function(torch.log_softmax(z, 0), reference.log())).sum(), z)
        return grad

    torch.testing.assert_close(expected_gradient(divergences.kl_k2), true)
    torch.testing.assert_close(expected_gradient(divergences.kl_k1), torch.zeros(3, dtype=F64))
    torch.testing.assert_close(expected_gradient(divergences.kl_k3), pi - reference)


@pytest.mark.parametrize("difference", [11.0, 500.0])
def test_the_value_of_k3_stops_at_ten_on_both_sides(difference: float) -> None:
    logp = tensor(-difference, 0.0).requires_grad_()
    k3 = divergences.kl_k3(logp, tensor(0.0, -difference))
    assert k3.tolist() == [10.0, 10.0]
    (grad,) = torch.autograd.grad(k3.sum(), logp)
    assert grad.tolist() == [0.0, 0.0]


def test_k3_below_its_bound_is_the_formula() -> None:
    # d = 2.5: e^2.5 − 3.5 = 8.6825; d = 5 would be 142.41; d = −10: e^−10 + 9 = 9.0000454.
    logp = tensor(-2.5, -5.0, 0.0).requires_grad_()
    k3 = divergences.kl_k3(logp, tensor(0.0, 0.0, -10.0))
    assert k3.tolist() == pytest.approx([8.682493960703473, 10.0, 9.000045399929762], abs=1e-9)
    (grad,) = torch.autograd.grad(k3.sum(), logp)
    assert grad.tolist() == pytest.approx([1 - math.exp(2.5), 0.0, 1 - math.exp(-10.0)])


def test_no_gradient_reaches_the_reference() -> None:
    for function in (divergences.kl_k1, divergences.kl_k2, divergences.kl_k3):
        logp, reference = tensor(-1.0).requires_grad_(), tensor(-2.0).requires_grad_()
        function(logp, reference).sum().backward()
        assert reference.grad is None


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_zero_only_without_a_difference(a: float, b: float) -> None:
    for function in (divergences.kl_k2, divergences.kl_k3):
        value = function(tensor(a), tensor(b)).item()
        assert value >= 0
        assert function(tensor(a), tensor(a)).item() == 0
        if abs(a - b) > 1e-3:
            assert value > 0


def test_entropy_by_hand() -> None:
    # Uniform over 4: ln 4. (0.5, 0.25, 0.25): 0.5·ln 2 + 0.5·ln 4 = 1.5·ln 2.
    assert divergences.entropy_from_logits(torch.zeros(4, dtype=F64)).item() == pytest.approx(math.log(4))
    logits = tensor(0.5, 0.25, 0.25).log()
    assert divergences.entropy_from_logits(logits).item() == pytest.approx(1.5 * math.log(2))


def test_temperature_is_that_of_the_sampled_distribution() -> None:
    # Logits (2·ln 3, 0) at temperature 2 are odds 3:1: log-probs ln ¾ and ln ¼.
    logits = tensor(2 * math.log(3), 0.0).expand(2, 2)
    logp = divergences.token_logprobs(logits, torch.tensor([0, 1]), temperature=2.0)
    assert logp.tolist() == pytest.approx([math.log(0.75), math.log(0.25)])
    entropy = divergences.entropy_from_logits(logits, temperature=2.0)
    assert entropy.tolist() == pytest.approx([-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))] * 2)


def test_forbidden_tokens_add_nothing_to_entropy_or_gradient() -> None:
    logits = tensor(0.0, -math.inf, 0.0).requires_grad_()
    entropy = divergences.entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(entropy, logits)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)


def test_gradient_of_a_log_prob_is_one_hot_minus_probabilities() -> None:
    logits = tensor(0.5, 0.25, 0.25).log().unsqueeze(0).requires_grad_()
    logp = divergences.token_logprobs(logits, torch.tensor([1]))
    (grad,) = torch.autograd.grad(logp.sum(), logits)
    torch.testing.assert_close(grad, tensor(-0.5, 0.75, -0.25).unsqueeze(0))


def test_log_probs_survive_large_logits_and_half_precision() -> None:
    # Logits 1000 and 0: log-probs 0 and −1000, no overflow; bfloat16 input is computed in float32.
    logits = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]], dtype=torch.bfloat16)
    logp = divergences.token_logprobs(logits, torch.tensor([0, 1]))
    assert logp.dtype == torch.float32
    assert logp.tolist() == [0.0, -1000.0]


def test_estimators_and_log_probs_pass_the_numerical_gradient_check() -> None:
    logits, token = normal(3, 4).requires_grad_(), torch.tensor([1, 0, 3])
    reference = normal(3, seed=2)

    def penalty(x: Tensor) -> Tensor:
        logp = divergences.token_logprobs(x, token, temperature=1.3)
        return divergences.kl_k2(logp, reference) + divergences.kl_k3(logp, reference)

    assert torch.autograd.gradcheck(penalty, (logits,))
    assert torch.autograd.gradcheck(divergences.entropy_from_logits, (logits,))


def test_the_advantages_towards_a_target_are_0_at_the_target_and_bounded_where_the_ratio_is_not() -> None:
    for divergence in ("reverse", "forward", "jensen_shannon"):
        assert divergences.towards(tensor(0.0), divergence).item() == pytest.approx(0.0, abs=1e-15)
    # u = 3: log 3, 3 − 1, ½·log 2.
    ratio = tensor(math.log(3.0))
    found = [divergences.towards(ratio, each).item() for each in ("reverse", "forward", "jensen_shannon")]
    assert found == pytest.approx([1.0986122886681098, 2.0, 0.34657359027997264], abs=1e-15)
    assert divergences.towards(tensor(100.0), "forward").item() == pytest.approx(math.expm1(20.0))
