"""Compare plans with the counts of torch's allocator, for shapes that the benchmark does not have."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.live_bytes import live_bytes
from tests.support.tiny import train_engine

from kapelle.cluster.planning import sampling_memory
from kapelle.cluster.planning.planned_run import Shape, shape_of
from kapelle.cluster.planning.update_memory import (
    Compute,
    Pass,
    SharedPrefix,
    activations,
    block_backward,
    kept,
    logits,
    passes_of,
)
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import FlatRows, Job
from kapelle.engines.train.protocol import UpdateLimits
from kapelle.engines.train.torch.large_head import Entropy
from kapelle.models.embedded import build_tokenizer
from kapelle.models.language_model import LanguageModel
from kapelle.models.outline import outline_of
from kapelle.rows import Sample
from kapelle.team import Lora, Policy
from kapelle.types import Sampling

WITHIN = 0.15
LORA = Lora(rank=6, alpha=12.0)
LAYERS = 7  # adapted in a block
STEM, ANSWER, GROUP = 21, 40, 3


class Case(NamedTuple):
    family: str = "qwen3"
    words: int = 900
    tied: bool = True
    full: bool = False
    checkpointing: bool = False
    dtype: str = "float32"


CASES = {
    "adapter": Case(),
    "all weights, untied": Case(tied=False, full=True),
    "all weights, checkpointing": Case(full=True, checkpointing=True),
    "half precision, many words": Case(words=31_000, dtype="bfloat16"),
}


def model_of(case: Case) -> tuple[LanguageModel, Shape]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.family,
        vocab_size=case.words,
        hidden_size=80,
        intermediate_size=144,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=case.tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    held = torch.float32 if case.full else getattr(torch, case.dtype)
    made = AutoModelForCausalLM.from_config(config, dtype=held)
    settings: Mapping[str, Any] = config.to_dict()
    return LanguageModel(made, build_tokenizer(256), case.dtype), shape_of(settings, outline_of(made))


def samples(words: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, words, (count,), generator=draw).tolist())

    stems = [tokens(STEM) for _ in range(6)]
    places = tuple(range(STEM, STEM + ANSWER))
    return [Sample("a", (*stem, *tokens(ANSWER)), places) for stem in stems for _ in range(GROUP)]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_update_takes_the_planned_memory(case: Case) -> None:
    model, shape = model_of(case)
    lora = None if case.full else LORA
    limits = UpdateLimits(microbatch_tokens=300, gradient_checkpointing=case.checkpointing)
    engine = train_engine([Policy("a", lora=lora)], models={"base": model}, stirred=False, limits=limits)
    low = 0 if case.full else LORA.rank * LAYERS
    tree = SharedPrefix(STEM, (ANSWER - 1,) * GROUP, (ANSWER,) * GROUP, low)
    work: Pass = next(iter(passes_of([tree] * 6, 300)))
    size = 4 if case.dtype == "float32" else 2
    how = Compute(size, 4 if case.full else size, True, case.full, not case.full, case.checkpointing)
    forward = engine.forward
    ((_, batch), *_) = list(forward.batches(samples(case.words)))
    assert len(batch.tokens_N) == work.tokens
    home = engine.placements["a"]

    def body() -> torch.Tensor:
        with home.model.computing([(home.adapter, 0, work.tokens)]):
            return home.model.hidden(
                batch.tokens_N, batch.positions_N, batch.plan, recompute=case.checkpointing
            )

    hidden, live = live_bytes(body)
    assert live.left == pytest.approx(kept(shape, work, how) + hidden.nbytes, rel=WITHIN)
    del hidden
    gc.collect()

    def update() -> None:
        ((_, _, output),) = forward.outputs(batch, Entropy.MEASURED)
        assert not isinstance(output, torch.Tensor)
        output.logp_K.sum().backward()

    _, live = live_bytes(update)
    in_head = activations(shape, work, how) + logits(shape, work, how)
    head = 4 * shape.head if case.full else 0
    planned = max(in_head, block_backward(shape, work, how)) + head
    assert live.peak == pytest.approx(planned, rel=WITHIN)
    if case.words > 10_000:
        assert logits(shape, work, how) > 0.15 * planned, "the head is not lost in the rest"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "merging"), [(Case("llama", 5000), True), (Case(words=700, tied=False), False)]
)
def test_sampling_takes_the_planned_memory(case: Case, merging: bool) -> None:
    model, shape = model_of(case)
    for number, name in enumerate("ab"):
        model.bank.add(name, LORA, number)
    decoder = Decoder(model, 2, 4096)
    if not merging:
        decoder._fused = None
        decoder.drop()
    prompts = [(name, tuple(range(7 + 30 * k, 24 + 30 * k)) * 3) for name in "ab" for k in range(4)]
    texts = [text for text in prompts for _ in range(5)]
    jobs = [Job(*text, Sampling(max_tokens=41), seed) for seed, text in enumerate(texts)]
    rows = sampling_memory.PlannedRows(len(jobs), 8, 51, 41, tempered=False, adapters=2)
    each = sampling_memory.place_bytes(shape, 4)
    held: list[int] = []

    def play() -> None:
        decoder.join(jobs)
        while decoder.in_flight:
            found = decoder._rows
            assert isinstance(found, FlatRows)
            held.append(each * found._cache.places)
            decoder.advance(1)

    decoder.join(jobs)  # merges weights
    decoder.drop()
    gc.collect()
    _, live = live_bytes(play)
    end, most = sampling_memory.places(rows)
    assert max(held) == pytest.approx(each * end, rel=WITHIN)
    planned = max(
        each * rows.prompts * rows.prompt + sampling_memory.reading(shape, rows, 4, fused=merging, cpu=True),
        each * end + sampling_memory.step_logits(shape, rows),
        each * most + 4 * rows.rows * shape.vocabulary,
        each * (end + min(4096, end)) + 4 * rows.rows * shape.vocabulary,  # all are kept when they leave
    )
    assert live.peak == pytest.approx(planned, rel=WITHIN)
