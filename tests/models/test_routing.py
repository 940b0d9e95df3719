"""The experts that sampling chose are those that training takes, also where the two would choose otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.families import build, tokenizer
from tests.support.tiny import lora_policies, stir, train_engine
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import Objective
from kapelle.errors import ConfigError, ParityError
from kapelle.models.language_model import LanguageModel
from kapelle.models.routing import packed, unpacked
from kapelle.rows import Column, Sample
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.team import Lora
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Routing, Sampling, Task, Turn

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

ROWS = [("a", 5, 8), ("b", 12, 4), ("a", 10, 8), ("b", 3, 6), ("a", 7, 8), ("b", 6, 8)]
"""Adapter, tokens of the prompt and of the completion. Rows that end early read on until enough have ended to leave."""
LORA = Lora(rank=2, alpha=4.0, targets=("all-linear", "experts"))
FAMILIES = [
    "qwen3_moe",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "granitemoe", "olmoe", "llama4_text")
    ),
]


class OtherChoices(TorchFunctionMode):
    """Routers that choose other experts than their scores say, as rounding would near a tie; shares follow from the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and args[0].ndim == 2 and args[0].shape[1] == 4:
            noise = torch.rand(args[0].shape, generator=self.generator)
            index = noise.argsort(1)[:, : found.indices.shape[1]]
            return torch.return_types.topk((args[0].gather(1, index), index))
        return found


def jobs() -> list[Job]:
    return [
        Job(
            adapter, tuple((37 * k + 11 * i) % 250 + 6 for i in range(length)), Sampling(max_tokens=tokens), k
        )
        for k, (adapter, length, tokens) in enumerate(ROWS)
    ]


def sampled_otherwise(family: str) -> tuple[LanguageModel, Any, list[Sample]]:
    model = LanguageModel(build(family), tokenizer(), name=family, replays_routing=True)
    lora = LORA if family != "llama4_text" else replace(LORA, targets=("all-linear",))
    engine = train_engine(lora_policies("a", "b", lora=lora), models={"base": model}, stirred=False)
    for seed, name in enumerate("ab"):
        stir(model.bank.parameters(name), seed, 0.1)
    decoder = Decoder(model, adapters=2)  # tries the model's cache, with its own choices
    with OtherChoices():
        outputs = decoder.join(jobs())
        while decoder.in_flight:
            decoder.advance(1)
    samples = []
    for job, output in zip(jobs(), outputs, strict=True):
        places = tuple(range(len(job.prompt), len(job.prompt) + len(output.ids)))
        columns: dict[str, Tensor] = {
            Column.BEHAVIOUR: torch.tensor(output.logprobs),
            Column.ADVANTAGE: torch.linspace(-1, 1, len(places)),
        }
        samples.append(
            Sample(job.adapter or "", (*job.prompt, *output.ids), places, columns, routing=output.routing)
        )
    return model, engine, samples


class TestReplay:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_log_probs_equal_the_samplers_where_its_routers_chose_otherwise(self, family: str) -> None:
        _, engine, samples = sampled_otherwise(family)
        free = engine.score([replace(sample, routing=None) for sample in samples])
        for sample, found_T, free_T in zip(samples, engine.score(samples), free, strict=True):
            assert sample.routing is not None
            assert len(unpacked(sample.routing)) == len(sample.tokens) - 1
            behaviour_T = sample.columns[Column.BEHAVIOUR]
            assert float((found_T - behaviour_T).abs().max()) < 1e-5
            assert float((free_T - behaviour_T).abs().max()) > 0.005

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_an_update_needs_them_too(self, checkpointing: bool) -> None:
        model, engine, samples = sampled_otherwise("qwen3_moe")
        engine.limits = replace(engine.limits, gradient_checkpointing=checkpointing)
        engine.forward.limits = engine.limits
        with pytest.raises(ParityError):
            engine.update([replace(s, routing=None) for s in samples], Objective(SurrogateConfig().build()))
        before = {key: tensor.clone() for key, tensor in engine.weights("a").items()}
        # The gradient is that of a pass under the recorded choices alone.
        own = [sample for sample in samples if sample.learner == "a"]
        loss = torch.zeros(())
        for sample in own:
            ids = torch.tensor([sample.tokens])
            experts_NLk = torch.cat([unpacked(sample.routing), torch.full((1, 2, 2), -1, dtype=torch.int16)])  # type: ignore[arg-type]
            with model.bank.routed([("a", 0, 1)], None, experts_NLk):
                logits_LV = model.model(input_ids=ids, use_cache=False).logits[0]
            places = torch.tensor(sample.targets)
            logp_T = logits_LV.log_softmax(-1)[places - 1, ids[0, places]]
            loss = loss - (logp_T * sample.columns[Column.ADVANTAGE]).sum()
        expected = torch.autograd.grad(loss, list(model.bank.parameters("a").values()))
        engine.update(samples, Objective(SurrogateConfig().build()))
        learner = engine.learners["a"]
        moments = [learner.optimizer.state[p]["exp_avg"] for p in learner.parameters.values()]
        ours, theirs = (torch.cat([each.flatten() for each in g]) for g in (moments, expected))
        assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 1 - 1e-5
        assert any(not torch.equal(before[key], tensor) for key, tensor in engine.weights("a").items())


class TestData:
    def test_choices_are_the_same_after_packing_and_in_rows_between_processes(self) -> None:
        experts_TLk = torch.randint(0, 300, (7, 3, 2))
        routing = packed(experts_TLk)
        assert torch.equal(unpacked(routing).long(), experts_TLk)
        turn = Turn("a", "p", 0, "h", 0, 0, (5, 6), (7,), (-0.5,), "stop", "x", routing=routing)
        episode = Episode(Task("t", "q"), 0, ("a",), (turn,))
        assert load_episode(json.loads(dump_episode(episode))) == episode
        kept = json.loads(dump_episode(episode, lambda image: None))
        assert "routing" not in kept["turns"][0], "a run's own rows do without"
        assert load_episode(kept).turns[0] == replace(turn, routing=None)
        assert Routing(3, 2, routing.data) == routing


class TestRefusals:
    def test_an_engine_that_does_not_say_which_experts_it_took_is_named(self) -> None:
        settings: dict[str, Any] = {
            "model": {"routing": "replayed"},
            "team": {"agents": 1},
            "environment": {"name": "arithmetic"},
            "workflow": {"name": "solo"},
            "algorithm": {"name": "grpo"},
            "engine": {"name": "vllm"},
        }
        with pytest.raises(ConfigError, match=r"`engine.name: vllm`"):
            Trainer(**settings)
