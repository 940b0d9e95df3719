"""How models decode is tried out: a way is taken if its logits are those of the whole texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.families import FAMILIES, family_model, tokenizer
from tests.support.tiny import stir
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import (
    Job,
    PaddedRows,
    RereadRows,
    decode_strategy,
    plain_cache,
)
from kapelle.models.language_model import LanguageModel
from kapelle.team import Lora
from kapelle.types import Sampling

JOBS = [
    Job(adapter, tuple(range(10 + k, 10 + k + length)), Sampling(max_tokens=tokens), k)
    for k, (adapter, length, tokens) in enumerate(
        [("a", 5, 6), ("b", 11, 3), ("a", 8, 6), (None, 3, 5), ("b", 2, 6)]
    )
]


def with_adapters(family: str) -> LanguageModel:
    model = family_model(family)
    for seed, name in enumerate("ab"):
        model.bank.add(name, Lora(rank=2, alpha=4.0), seed)
        stir(model.bank.parameters(name), seed, 0.1)
    return model


@torch.no_grad()
def read_alone(model: LanguageModel, job: Job, ids: list[int]) -> Tensor:
    """The completion's log-probs by `transformers` alone, one text at a time."""
    text = torch.tensor([[*job.prompt, *ids]])
    with model.bank.routed([(job.adapter, 0, 1)]):
        logits_LV: Tensor = model.model(input_ids=text, use_cache=False).logits[0]
    places = torch.arange(len(job.prompt) - 1, text.shape[1] - 1)
    return logits_LV.log_softmax(-1)[places, torch.tensor(ids)]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3", "flat"),
        ("gpt2", "cache"),
        ("mistral", "flat"),  # a window that is shorter than these texts
        ("cohere2", "cache"),  # likewise
        ("falcon_h1", "cache"),
        ("lfm2", "cache"),
        ("mamba", "reread"),
        ("rwkv", "reread"),
    ],
)
def test_each_model_decodes_its_own_way_to_the_logits_of_its_texts(family: str, way: str) -> None:
    model = with_adapters(family)
    assert decode_strategy(model).name == way
    for job, output in zip(JOBS, decode(model, JOBS), strict=True):
        gap = (torch.tensor(output.logprobs) - read_alone(model, job, output.ids)).abs().max()
        assert float(gap) < 3e-6


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "way"), [("gpt2", "cache"), ("falcon_h1", "cache"), ("mamba", "reread")])
def test_a_large_model_decodes_as_small_ones_of_its_kind(family: str, way: str) -> None:
    settings = AutoConfig.for_model(family, **{**FAMILIES[family], "vocab_size": 320_000})
    model = LanguageModel(AutoModelForCausalLM.from_config(settings), tokenizer())
    found = decode_strategy(model)
    assert found == decode_strategy(family_model(family))
    assert found.name == way


def test_a_cache_with_a_small_error_is_not_used() -> None:
    model = family_model("gpt2")
    assert decode_strategy(model).name == "cache"

    def forget_a_little(_module: object, _inputs: object, options: dict[str, Any], output: Any) -> Any:
        if options.get("past_key_values") is not None:
            output.last_hidden_state = output.last_hidden_state * 1.001
        return output

    model.body.register_forward_hook(forget_a_little, with_kwargs=True)
    assert decode_strategy(model).name == "reread"


def test_rereading_takes_prompts_while_others_are_in_flight() -> None:
    model = with_adapters("gpt2")
    rows = RereadRows(model)
    first = rows.join(JOBS[:2])
    assert rows.open
    second = rows.join(JOBS[2:3])
    assert torch.allclose(
        torch.cat((first, second)), PaddedRows(model, plain_cache).join(JOBS[:3]), atol=1e-5
    )
    both = rows.read(torch.tensor([7, 8, 9]))
    rows.leave([0], [(7,)])
    after = rows.read(torch.tensor([3, 4]))
    alone = RereadRows(model)
    alone.join([Job("b", (*JOBS[1].prompt, 8), JOBS[1].sampling, 0)])
    assert both.shape == (3, 262)
    assert torch.allclose(after[0], alone.read(torch.tensor([3]))[0], atol=1e-5)
