"""Adapters on a mixture's experts: as PEFT computes them, one row's apart from another's, saved and loaded as PEFT does."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.families import build, family_model, tokenizer
from tests.support.tiny import (
    draw_samples,
    first_gradient,
    lora_policies,
    stir,
    train_engine,
    with_behaviour,
)
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.errors import ModelError
from kapelle.models.adapters import adapted_layers, named, read_lora
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.outline import check_saved, outline_of
from kapelle.models.weights import read_adapter, read_model, save_adapter, save_model
from kapelle.team import Lora
from kapelle.training.exporting import merged

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

LORA = Lora(rank=2, alpha=4.0, targets=("all-linear", "experts"))
TOKENS = torch.arange(6, 6 + 3 * 7).reshape(3, 7)
FAMILIES = [
    "qwen3_moe",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in (
            "mixtral",
            "qwen2_moe",
            "gpt_oss",
            "deepseek_v3",
            "granitemoe",
            "olmoe",
            "jamba",
            "qwen3_next",
        )
    ),
]


def logits(model: LanguageModel, tokens: Tensor, *route: tuple[str | None, int, int]) -> Tensor:
    with torch.no_grad(), model.bank.routed(route):
        found: Tensor = model.model(input_ids=tokens, use_cache=False).logits
    return found


class TestAsPeft:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_saved_adapter_computes_the_same_in_peft(self, family: str, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = family_model(family)
        bare = copy.deepcopy(model.model)
        model.bank.add("a", LORA, seed=0)
        stir(model.bank.parameters("a"), 1)
        save_adapter(tmp_path, model.bank.parameters("a"), named(layers_of(model.model), LORA), family)
        theirs = peft.PeftModel.from_pretrained(bare, str(tmp_path)).eval()
        with torch.no_grad():
            expected = theirs(input_ids=TOKENS, use_cache=False).logits
        own = logits(model, TOKENS, ("a", 0, 3))
        assert float((own - expected).abs().max()) < 1e-5
        # Those on experts matter: without them it computes something else.
        for key, tensor in model.bank.parameters("a").items():
            if ".experts." in key:
                tensor.detach().zero_()
        assert float((own - logits(model, TOKENS, ("a", 0, 3))).abs().max()) > 0.01

    def test_a_folder_that_peft_wrote_is_read(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        theirs = peft.get_peft_model(
            build("mixtral"),
            peft.LoraConfig(
                r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"]
            ),
        )
        stir({name: tensor for name, tensor in theirs.named_parameters() if "lora_" in name}, 3)
        theirs.save_pretrained(str(tmp_path))
        tensors, lora = read_adapter(tmp_path)
        assert lora == Lora(2, 4.0, ("q_proj", "experts.down_proj"))
        model = family_model("mixtral")
        model.bank.add("a", lora, seed=0)
        model.bank.fill("a", tensors)
        with torch.no_grad():
            expected = theirs.eval()(input_ids=TOKENS, use_cache=False).logits
        assert float((logits(model, TOKENS, ("a", 0, 3)) - expected).abs().max()) < 1e-5
        check_saved("'a'", tmp_path, lora, outline_of(model.model))

    def test_a_folder_with_factors_on_a_router_is_rejected(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        theirs = peft.get_peft_model(
            build("mixtral"), peft.LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight"])
        )
        theirs.save_pretrained(str(tmp_path))
        with pytest.raises(ModelError, match="target_parameters"):
            read_lora(tmp_path)


class TestRows:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_rows_keep_to_their_adapters(self, family: str) -> None:
        model = family_model(family)
        for seed, name in enumerate("ab"):
            model.bank.add(name, Lora(rank=2, alpha=4.0, targets=("experts",)), seed)
            stir(model.bank.parameters(name), seed)
        mixed = logits(model, TOKENS, ("a", 0, 1), (None, 1, 2), ("b", 2, 3))
        for row, chosen in enumerate(("a", None, "b")):
            alone = logits(model, TOKENS[row : row + 1], (chosen, 0, 1))
            assert float((mixed[row] - alone[0]).abs().max()) < 1e-5
        assert float((mixed[0] - logits(model, TOKENS[:1], (None, 0, 1))[0]).abs().max()) > 0.01


class TestLearning:
    def test_the_gradient_is_that_of_weights_with_the_factors_merged(self) -> None:
        lora = Lora(rank=2, alpha=4.0, targets=("experts",))
        model, bare = family_model("qwen3_moe"), build("qwen3_moe")
        engine = train_engine(lora_policies("a", lora=lora), models={"base": model}, stirred=False)
        stir(model.bank.parameters("a"), 0, 0.1)
        samples = with_behaviour(engine, draw_samples(["a"], [(3, 5), (7, 2)]))
        own, experts = model.bank.parameters("a"), "model.layers.{}.mlp.experts"
        merged = {}
        for block in range(2):
            for leaf, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
                # PEFT's product of the factors: experts are the slow axis of A and the fast one of B.
                place = f"base_model.model.{experts.format(block)}{inner}"
                a_ErI = own[f"{place}.lora_A.weight"].reshape(4, 2, -1)
                b_OrE = own[f"{place}.lora_B.weight"].reshape(-1, 2, 4)
                name = f"{experts.format(block)}.{leaf}"
                merged[name] = bare.get_parameter(name) + 2.0 * torch.einsum("ore,eri->eoi", b_OrE, a_ErI)
        loss = torch.zeros(())
        for sample in samples:
            inputs = {"input_ids": torch.tensor([sample.tokens]), "use_cache": False}
            logits_LV = torch.func.functional_call(bare, merged, (), inputs).logits[0]
            places = torch.tensor(sample.targets)
            logp_T = logits_LV.log_softmax(-1)[places - 1, torch.tensor(sample.tokens)[places]]
            loss = loss - (logp_T * sample.columns["advantage"]).sum()
        expected = torch.autograd.grad(loss, list(own.values()))
        engine.update(samples, Objective(SurrogateConfig().build()))
        found = first_gradient(engine, "a")
        ours, theirs = (torch.cat([each.flatten() for each in g]) for g in (found.values(), expected))
        assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 1 - 1e-6

    def test_a_step_moves_the_experts_factors_and_nothing_of_the_base(self) -> None:
        model = family_model("mixtral")
        before = {name: tensor.clone() for name, tensor in model.base_parameters().items()}
        engine = train_engine(lora_policies("a", lora=LORA), models={"base": model}, stirred=False)
        factors = {key: tensor.clone() for key, tensor in engine.weights("a").items()}
        samples = with_behaviour(engine, draw_samples(["a"], [(9, 7), (12, 8)]))
        engine.update(samples, Objective(SurrogateConfig().build()))
        moved = {key for key, tensor in engine.weights("a").items() if not torch.equal(tensor, factors[key])}
        assert {key for key in factors if "experts" in key and "lora_B" in key} <= moved
        assert before.keys() == model.base_parameters().keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.base_parameters().items())


class TestRouters:
    @pytest.mark.parametrize("trains_router", [False, True])
    def test_a_router_stays_bitwise_where_all_weights_train_unless_it_is_to_learn(
        self, trains_router: bool
    ) -> None:
        model = LanguageModel(build("qwen3_moe"), tokenizer(), trains_router=trains_router)
        policies = [replace(policy, lora=None) for policy in lora_policies("a")]
        engine = train_engine(policies, models={"base": model}, stirred=False)
        before = {name: tensor.clone() for name, tensor in engine.weights("a").items()}
        routers = {name for name in before if ".gate." in name}
        assert len(routers) == 2
        for _ in range(2):
            samples = with_behaviour(engine, draw_samples(["a"], [(9, 7), (12, 8)]))
            engine.update(samples, Objective(SurrogateConfig().build()))
        moved = {
            name for name, tensor in engine.weights("a").items() if not torch.equal(tensor, before[name])
        }
        assert moved >= before.keys() - routers
        assert bool(moved & routers) is trains_router
        other = LanguageModel(build("qwen3_moe"), tokenizer(), trains_router=trains_router)
        again = train_engine(policies, models={"base": other}, stirred=False)
        again.load_state(copy.deepcopy(engine.state()))
        assert all(torch.equal(t, engine.weights("a")[name]) for name, t in again.weights("a").items())


class TestFolders:
    def test_an_adapter_merged_into_its_base_computes_the_same(self, tmp_path: Path) -> None:
        for family, lora in (("qwen3_moe", LORA), ("gpt_oss", LORA), ("gpt2", Lora(rank=2, alpha=4.0))):
            model, place = family_model(family), tmp_path / family
            model.bank.add("a", lora, seed=0)
            stir(model.bank.parameters("a"), 1)
            save_adapter(place, model.bank.parameters("a"), named(layers_of(model.model), lora), family)
            whole = build(family)
            with torch.no_grad():
                for name, tensor in merged(family_model(family), place).items():
                    whole.get_parameter(name).copy_(tensor)
                found = whole(input_ids=TOKENS, use_cache=False).logits
            # Each layer sums over the hidden size, and may round once for each term.
            terms = model.model.config.hidden_size * model.model.config.num_hidden_layers
            bound = terms * torch.finfo(torch.float32).eps * float(found.abs().max())
            assert float((logits(model, TOKENS, ("a", 0, 3)) - found).abs().max()) < bound < 1e-3

    def test_a_saved_mixture_is_reloaded_from_separate_experts(self, tmp_path: Path) -> None:
        model = family_model("mixtral")
        save_model(tmp_path, model)
        own = model.base_parameters()
        check_saved("'a'", tmp_path, None, outline_of(model.model))
        found = read_model(tmp_path, own.keys())
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
        with pytest.raises(ModelError, match="cannot start from"):
            check_saved("'a'", tmp_path, None, outline_of(build("qwen3_moe")))


class TestNames:
    def test_all_linear_excludes_experts_unless_they_are_named(self) -> None:
        layers = layers_of(build("qwen3_moe"))
        assert not any("experts" in path for path in adapted_layers(layers, ("all-linear",)))
        assert named(layers, LORA).targets == (
            *("experts.down_proj", "experts.gate_up_proj"),
            *("k_proj", "o_proj", "q_proj", "v_proj"),
        )
