"""Grouped updates of adapters: the numbers of one product after another, forward, backward and under dropout.

On a CPU, the operations compute one group after another (the kernels have `test_triton_products.py`). So everything here
is what a GPU is asked for, except how fast it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.tiny import same_bits, stir, tiny_model
from torch import Tensor

from kapelle.models.fast import routed_linear
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.fast.routed_linear import (
    AdapterGroup,
    StoredStacks,
    add_updates,
    backward_updates,
)
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear, Route, linear
from kapelle.team import Lora

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "a": Lora(rank=2, alpha=4.0, targets=EVERYWHERE),
    "b": Lora(rank=11, alpha=5.0, targets=("q_proj", "v_proj", "down_proj")),
    "c": Lora(rank=1, alpha=0.5, targets=("o_proj", "down_proj")),
    "d": Lora(rank=3, alpha=3.0, targets=EVERYWHERE),
}
LENGTHS = (5, 9, 4, 3, 7, 2)
ROUTE: Route = [("a", 0, 5), (None, 5, 14), ("b", 14, 18), ("c", 18, 21), ("a", 21, 28), (None, 28, 30)]


def bank_of(
    kinds: Mapping[str, Lora], dtype: str = "float32", size: float = 0.3
) -> tuple[LanguageModel, dict[str, Tensor]]:
    """A tiny model with stirred adapters that learn, and their parameters by adapter and name."""
    model = tiny_model(dtype=dtype, size=size)
    for seed, (name, lora) in enumerate(kinds.items()):
        model.bank.add(name, lora, seed)
        stir(model.bank.parameters(name), seed, size)
    model.bank.train(on=True)
    return model, {
        f"{name} {key}": parameter for name in kinds for key, parameter in model.bank.parameters(name).items()
    }


def learned(
    model: LanguageModel, parameters: Mapping[str, Tensor], route: Route = ROUTE, seed: int = 0
) -> dict[str, Tensor | None]:
    """One pass and its backward pass: hidden states, the gradient of the embeddings, and each parameter's."""
    torch.manual_seed(seed)
    embedding = model.model.get_input_embeddings().weight.requires_grad_(True)
    tokens_N = torch.randint(6, 262, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    position_N = torch.cat([torch.arange(length) for length in LENGTHS])
    with model.computing(route):
        hidden_ND = model.hidden(tokens_N, position_N, plan_sequences(LENGTHS))
    given_ND = torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(2))
    names = ("embedding", *parameters)
    grads = torch.autograd.grad(
        (hidden_ND.float() * given_ND).sum(), (embedding, *parameters.values()), allow_unused=True
    )
    return {"hidden": hidden_ND.detach(), **dict(zip(names, grads, strict=True))}


def with_dropout(shares: Sequence[float]) -> dict[str, Lora]:
    """The adapters, each with its share of dropout."""
    return {
        name: Lora(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=share)
        for (name, lora), share in zip(KINDS.items(), shares, strict=True)
    }


def of_a_layer(
    model: LanguageModel,
    parameters: Mapping[str, Tensor],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The output of one layer that all adapters of the route target, and the gradients of all that it reads."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(5)
    x_NI = torch.randn(sum(LENGTHS), 32, generator=generator).to(dtype).requires_grad_(True)
    layer = model.model.model.layers[1].mlp.down_proj
    reads = {
        name: p for name, p in parameters.items() if "layers.1.mlp.down_proj" in name and name[0] in "abc"
    }
    with model.bank.routed(ROUTE):
        y_NO = linear(layer, x_NI)
    given_NO = torch.randn(y_NO.shape, generator=generator).to(dtype)
    grads = torch.autograd.grad(y_NO, (x_NI, *reads.values()), given_NO)
    return {"y": y_NO.detach(), **dict(zip(("x", *reads), grads, strict=True))}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many layers and groups each sum of grouped outer products had."""
    sizes: list[tuple[int, int]] = []
    plain = routed_linear.GROUPED_OUTER

    def watched(lefts: Sequence[Tensor], right_NQ: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Any:
        sizes.append((len(lefts), len(ends_G)))
        return plain(lefts, right_NQ, ends_G, dtype)

    monkeypatch.setattr(routed_linear, "GROUPED_OUTER", watched)
    return sizes


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: True)


def far(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


class TestNumbers:
    def test_two_groups_by_hand(self) -> None:
        """y = x + s·B·A·x: 1 + 2·3·(4·1) = 25 for the first row, 1 for the bare one, 1 + 0.5·5·(6·1) = 16."""
        one_11 = torch.ones(1, 4) / 4
        x_NI, out_NO = torch.ones(3, 4), torch.ones(3, 4)
        groups = [
            AdapterGroup(0, 1, 16 * one_11, torch.full((4, 1), 0.75 * 2), 2.0, 0.0),
            AdapterGroup(2, 3, 24 * one_11, torch.full((4, 1), 1.25), 0.5, 0.0),
        ]
        low_Nr, mask_NI = add_updates([groups], x_NI, [out_NO])
        assert low_Nr[:, 0].tolist() == [2.0 * 16, 0.0, 0.5 * 24]
        assert mask_NI is None
        assert out_NO[:, 0].tolist() == [1 + 2 * 1.5 * 16, 1.0, 1 + 0.5 * 1.25 * 24]

    def test_rows_may_lie_anywhere(self) -> None:
        generator = torch.Generator().manual_seed(6)
        wide_NI, given_NO = torch.randn(2, 6, 9, generator=generator)
        a_rI, b_Or = torch.randn(3, 8, generator=generator), torch.randn(8, 3, generator=generator)
        groups = [AdapterGroup(0, 4, a_rI, b_Or, 0.5, 0.0), AdapterGroup(4, 6, -a_rI, b_Or, 0.5, 0.0)]
        made = []
        for x_NI, dy_NO in (
            (wide_NI[:, 1:], given_NO[:, :8]),
            (wide_NI[:, 1:].clone(), given_NO[:, :8].clone()),
        ):
            out_NO, dx_NI = torch.zeros(6, 8), torch.zeros(6, 8)
            low_Nr, mask_NI = add_updates([groups], x_NI, [out_NO])
            assert bool(out_NO.any(1).all())
            factors = backward_updates([groups], low_Nr, mask_NI, x_NI, [dy_NO], dx_NI, factors=True)
            made.append([out_NO, dx_NI, *factors])
        assert all(far(one, other) < 1e-6 for one, other in zip(*made, strict=True))

    def test_they_are_those_of_one_product_after_another(
        self, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, int]]
    ) -> None:
        model, parameters = bank_of(KINDS)
        apart = learned(model, parameters)
        assert calls == []
        always(monkeypatch)
        together = learned(model, parameters)
        # The same rows have adapters in query and value, and others in key; gate and up are together.
        assert {layers for layers, _ in calls} == {1, 2}
        assert max(groups for _, groups in calls) == len(ROUTE)
        for name, expected in apart.items():
            found = together[name]
            if expected is None:
                assert found is None, name
            else:
                assert found is not None
                assert found.dtype == expected.dtype
                assert far(found, expected) < 2e-5, name

    def test_a_whole_model_under_dropout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, parameters = bank_of(with_dropout((0.5, 0.0, 0.2, 0.1)))
        apart = learned(model, parameters)
        always(monkeypatch)
        together = learned(model, parameters)
        for name, expected in apart.items():
            found = together[name]
            if expected is not None:
                assert found is not None
                assert far(found, expected) < 1e-4, name

    def test_in_half_precision_they_are_as_near_the_truth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, parameters = bank_of(KINDS)
        exact = of_a_layer(model, parameters)
        apart = of_a_layer(model, parameters, dtype=torch.bfloat16)
        always(monkeypatch)
        together = of_a_layer(model, parameters, dtype=torch.bfloat16)
        for name, expected in exact.items():
            error = float((together[name].float() - expected).square().mean().sqrt())
            error_apart = float((apart[name].float() - expected).square().mean().sqrt())
            assert 0 < error < 1.25 * error_apart, name


def forget_stacks(model: LanguageModel) -> None:
    for module in model.model.modules():
        if isinstance(module, BankedLinear):
            module.stacks = StoredStacks()


def fused_step(parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> None:
    """A step as a learner takes it: it writes the weights and counts no version of them."""
    for name, parameter in parameters.items():
        parameter.grad = grads[name]
    before = [parameter._version for parameter in parameters.values()]
    torch.optim.AdamW(list(parameters.values()), lr=0.1, fused=True).step()
    assert [parameter._version for parameter in parameters.values()] == before


def sampled(model: LanguageModel, _parameters: object = None) -> Tensor:
    tokens_N = torch.arange(6, 6 + sum(LENGTHS))
    with torch.inference_mode(), model.computing(ROUTE):
        return model.hidden(tokens_N, tokens_N - 6, plan_sequences(LENGTHS))


class TestKeptStacks:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int | None]]:
        """The order of the adapters in each stack that was made."""
        always(monkeypatch)
        orders: list[Sequence[int | None]] = []
        plain = routed_linear.stacked

        def watched(layers: Any, order: Sequence[int | None], dtype: torch.dtype) -> Any:
            orders.append(order)
            return plain(layers, order, dtype)

        monkeypatch.setattr(routed_linear, "stacked", watched)
        return orders

    @pytest.mark.parametrize("what", ["step", "fill", "fill while sampling", "other memory"])
    def test_a_change_is_seen(self, what: str, made: list[object]) -> None:
        model, parameters = bank_of(KINDS)
        before, said = learned(model, parameters), sampled(model)
        if what == "step":
            fused_step(parameters, before)
        elif what == "other memory":
            for number, parameter in enumerate(parameters.values()):
                parameter.data = parameter.data + 0.1 * (number % 3)
        else:
            with torch.inference_mode(mode="sampling" in what):
                other = {k: p + 0.1 * (p != 0) for k, p in model.bank.parameters("b").items()}
                model.bank.fill("b", other)
        after, then = learned(model, parameters), sampled(model)
        forget_stacks(model)
        assert same_bits(after, learned(model, parameters))
        assert same_bits(then, sampled(model))
        assert not same_bits(after["hidden"], before["hidden"])
        assert not same_bits(then, said)

    def test_a_backward_pass_between_two_steps(self, made: list[object]) -> None:
        """Passes, a step of its own for one adapter, passes: as without anything kept."""
        model, parameters = bank_of(KINDS)
        own = {name: p for name, p in parameters.items() if name.startswith("b ")}
        for _ in range(2):
            fused_step(own, learned(model, parameters))
            grads = learned(model, parameters)
            forget_stacks(model)
            assert same_bits(grads, learned(model, parameters))


class TestSeparation:
    def test_a_missing_adapter_gets_no_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        always(monkeypatch)
        grads = learned(*bank_of(KINDS))
        for name, grad in grads.items():
            assert (grad is None) == name.startswith("d "), name

    def test_an_adapters_gradient_is_independent_of_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        always(monkeypatch)
        model, parameters = bank_of(KINDS)
        before = learned(model, parameters)
        stir(model.bank.parameters("b"), seed=77)
        after = learned(model, parameters)
        for name in parameters:
            one, other = before[name], after[name]
            if name.startswith(("a ", "c ")):
                assert one is not None
                assert other is not None
                assert torch.equal(one, other), name
        name = "b base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert not same_bits(before[name], after[name])

    def test_frozen_adapters_beside_one_that_learns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        always(monkeypatch)
        model, parameters = bank_of(KINDS)
        whole = learned(model, parameters)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name.startswith("c "))
        some = learned(model, {name: p for name, p in parameters.items() if name.startswith("c ")})
        for name, grad in some.items():
            expected = whole[name]
            assert grad is not None
            assert expected is not None
            assert torch.equal(grad, expected), name
