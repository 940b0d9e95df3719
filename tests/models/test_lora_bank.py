"""Many adapters on one base: the numbers of PEFT, and no path from one adapter to another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.tiny import LORA, stir, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from kapelle.models.adapters import named
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear, LoraBank, Route, layers_of
from kapelle.team import Lora

# The reference implementation asks transformers something that it calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TOKENS = torch.arange(6, 6 + 5 * 9).reshape(5, 9)
WIDE = Lora(rank=4, alpha=12.0, targets=("q_proj", "v_proj", "down_proj"))
NARROW = Lora(rank=1, alpha=0.5, targets=("o_proj",))


def logits(model: LanguageModel, route: Route, tokens: Tensor = TOKENS) -> Tensor:
    with model.bank.routed(route):
        output: Tensor = model.model(input_ids=tokens, use_cache=False).logits
    return output


def add(model: LanguageModel, name: str, lora: Lora = LORA) -> Mapping[str, Tensor]:
    model.bank.add(name, lora, seed=1)
    stir(model.bank.parameters(name), sum(name.encode()))
    return model.bank.parameters(name)


def as_peft(base: PreTrainedModel, lora: Lora, weights: Mapping[str, Tensor]) -> Any:
    """The same adapter on a copy of the base, by the reference implementation."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(named(layers_of(base), lora).targets),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(copy.deepcopy(base), settings)
    given = {key.replace(".weight", ".default.weight"): value for key, value in weights.items()}
    left = model.load_state_dict(given, strict=False)
    assert not left.unexpected_keys
    assert not [key for key in left.missing_keys if "lora_" in key]
    return model.eval()


class TestAgainstPEFT:
    @torch.no_grad()
    def test_adapters_of_different_kinds_share_a_batch(self) -> None:
        model = tiny_model()
        plain = copy.deepcopy(model.model)
        kinds = {"a": LORA, "b": WIDE, "c": NARROW}
        references = {name: as_peft(plain, lora, add(model, name, lora)) for name, lora in kinds.items()}
        mixed = logits(model, [("b", 0, 2), (None, 2, 3), ("a", 3, 4), ("c", 4, 5)])
        for rows, name in ((slice(0, 2), "b"), (slice(3, 4), "a"), (slice(4, 5), "c")):
            expected = references[name](input_ids=TOKENS[rows]).logits
            assert float((mixed[rows] - expected).abs().max()) < 1e-5
        assert float((mixed[2:3] - plain(input_ids=TOKENS[2:3]).logits).abs().max()) < 1e-5

    def test_same_gradients(self) -> None:
        model = tiny_model()
        plain = copy.deepcopy(model.model)
        weights = add(model, "a", WIDE)
        theirs = as_peft(plain, WIDE, weights)
        logits(model, [("a", 0, 5)])[..., 7].sum().backward()
        theirs(input_ids=TOKENS).logits[..., 7].sum().backward()
        expected = dict(theirs.named_parameters())
        for name, parameter in model.bank.parameters("a").items():
            other = expected[name.replace(".weight", ".default.weight")].grad
            assert parameter.grad is not None
            assert other is not None
            assert float((parameter.grad - other).abs().max()) < 1e-4 * float(other.abs().max())


class TestStart:
    @torch.no_grad()
    def test_a_new_adapter_changes_nothing(self) -> None:
        model = tiny_model()
        before = logits(model, [])
        model.bank.add("a", WIDE, seed=3)
        assert torch.equal(logits(model, [("a", 0, 5)]), before)
        assert torch.equal(logits(model, [(None, 0, 5)]), before)

    def test_it_is_drawn_from_its_seed(self) -> None:
        banks = [LoraBank(tiny_model().model) for _ in range(3)]
        for bank, seed in zip(banks, (1, 1, 2), strict=True):
            bank.add("a", WIDE, seed)
        first, again, other = (bank.parameters("a") for bank in banks)
        down = [key for key in first if key.endswith("lora_A.weight")]
        assert down
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not any(torch.equal(first[key], other[key]) for key in down)


class TestSeparation:
    def test_no_gradient_reaches_another_adapter(self) -> None:
        model = tiny_model()
        for name in ("a", "b", "c"):
            add(model, name)
        output = logits(model, [("a", 0, 2), ("b", 2, 5)])
        output[2:].square().sum().backward()
        for name in ("a", "c"):
            grads = [p.grad for p in model.bank.parameters(name).values()]
            assert all(grad is None or not grad.any() for grad in grads)
        assert all(p.grad is not None and p.grad.any() for p in model.bank.parameters("b").values())

    @torch.no_grad()
    def test_rows_of_one_adapter_do_not_feel_another(self) -> None:
        model = tiny_model()
        add(model, "a")
        weights = add(model, "b")
        before = logits(model, [("a", 0, 2), ("b", 2, 5)])
        stir(weights, seed=99)
        after = logits(model, [("a", 0, 2), ("b", 2, 5)])
        assert torch.equal(before[:2], after[:2])
        assert not torch.equal(before[2:], after[2:])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "names",
        [
            ("keys", "items", "values", "pop"),
            ("forward", "training", "train", "parameters"),
            ("agent_1", "agent_10", "agent_11", "agent_100"),
            ("base", "adapters", "weight", "a_rI"),
            ("reference:a", "critic:a", "Zoë", "with space"),
        ],
    )
    @torch.no_grad()
    def test_any_name_is_only_a_name(self, names: tuple[str, ...]) -> None:
        model = tiny_model()
        plain = copy.deepcopy(model.model)
        references = {name: as_peft(plain, LORA, add(model, name)) for name in names}
        mixed = logits(model, [(name, row, row + 1) for row, name in enumerate(names)], TOKENS[:4])
        for row, name in enumerate(names):
            expected = references[name](input_ids=TOKENS[row : row + 1]).logits
            assert float((mixed[row] - expected[0]).abs().max()) < 1e-5
        assert list(model.bank.adapters) == list(names)

    @torch.no_grad()
    def test_a_route_applies_only_inside_its_block(self) -> None:
        model = tiny_model()
        add(model, "a")
        bare = logits(model, [])
        with pytest.raises(RuntimeError, match="inside"), model.bank.routed([("a", 0, 5)]):
            raise RuntimeError("inside")
        assert torch.equal(model.model(input_ids=TOKENS, use_cache=False).logits, bare)


class TestDropout:
    def test_it_drops_only_in_training_and_only_in_its_rows(self) -> None:
        model = tiny_model()
        add(model, "a", Lora(rank=2, dropout=0.5))
        add(model, "b")
        route: Route = [("a", 0, 2), ("b", 2, 5)]
        with torch.no_grad():
            still = logits(model, route)
            assert torch.equal(logits(model, route), still)
            model.bank.train(on=True)
            torch.manual_seed(0)
            first, second = logits(model, route), logits(model, route)
            model.bank.train(on=False)
            assert torch.equal(logits(model, route), still)
        assert not torch.equal(first[:2], second[:2])
        assert torch.equal(first[2:], still[2:])

    def test_each_layer_drops_other_features_of_a_token(self) -> None:
        model = tiny_model()
        add(model, "a", Lora(rank=2, dropout=0.5))
        layers = [module for module in model.model.modules() if isinstance(module, BankedLinear)]
        found = []
        with model.bank.routed([("a", 0, 5)], keys_N=torch.arange(5, dtype=torch.int32)):
            for layer in layers:
                [(factors, first, last)] = layer.factors()
                keys_n = layer.keys_of(factors, slice(first, last))
                assert keys_n is not None
                found.append(tuple(keys_n.tolist()))
        assert len(set(found)) == len(layers) > 2
