"""Decoding in few kernels gives the logits of the flat pass, whatever rows, adapters, weights and caches do meanwhile.

The operations run by their plain implementation; `tests/models/fast/test_decode_kernels.py` compares the kernels with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.families import build, tokenizer
from tests.support.tape import TapeRecorder
from tests.support.tiny import LORA, stir, tiny_model

from kapelle.engines.rollout.local import decode_pass, decode_strategies
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import FlatRows, Job, PagedRows, Rows
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, nowhere
from kapelle.models.fast.kv_cache import BLOCK, Prefixes
from kapelle.models.language_model import LanguageModel
from kapelle.team import Lora
from kapelle.types import Sampling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


MORE = (("o_proj",), ("q_proj", "up_proj"), ("v_proj", "down_proj"))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU decodes like a GPU."""
    monkeypatch.setattr(decode_pass, "runs_operations", lambda _device, _dtype: True)
    monkeypatch.setattr(decode_strategies, "keeps_rounded", lambda model: model.dtype != torch.float32)


def adapted(model: LanguageModel) -> LanguageModel:
    """Add adapters of two ranks, of which one changes a part of the layers alone."""
    few = Lora(rank=3, alpha=5, targets=("q_proj", "v_proj", "down_proj"))
    for seed, (name, lora) in enumerate((("a", LORA), ("b", few))):
        model.bank.add(name, lora, seed)
        stir(model.bank.parameters(name), seed, 0.1)
    return model


def rows_of(model: LanguageModel, recorder: GraphRecorder | None = None) -> tuple[PagedRows, FlatRows]:
    """Return rows that decode in few kernels, and rows of the flat pass."""
    assert model.flat is not None
    paged = Decoder(model, 2, 1 << 12, recorder_on=lambda _: recorder)._rows
    assert isinstance(paged, PagedRows)
    return paged, FlatRows(model, model.flat, None, Prefixes(1 << 12))


def jobs_of(lengths: list[int], seed: int, copies: int = 1) -> list[Job]:
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(6, 150) for _ in range(length)) for length in lengths]
    names = sorted(draw.choice((None, "a", "b")) or "" for _ in prompts)
    return [
        Job(name or None, prompt, Sampling(), 0)
        for name, prompt in zip(names, prompts, strict=True)
        for _ in range(copies)
    ]


def read(rows: tuple[Rows, ...], steps: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Read the same tokens with both, and compare all logits."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        token_R = torch.randint(6, 150, (len(rows[0]),), generator=draw)
        one, other = (each.read(token_R) for each in rows)
        far = (one - other).norm() / other.norm()
        assert far < (1e-5 if dtype == torch.float32 else 0.03), float(far)


def each(rows: tuple[Rows, ...], act: Callable[[Any], object]) -> None:
    for one in rows:
        act(one)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_decodes_as_in_the_flat_pass(family: str) -> None:
    """Own and shared prompts, blocks that fill, windows, caps and biases."""
    rows = rows_of(adapted(LanguageModel(build(family), tokenizer(), "float32", family)))
    each(rows, lambda it: it.join(jobs_of([5, BLOCK, 3 * BLOCK - 2, 2, 61], 1)))
    read(rows, 5, 2)
    each(rows, lambda it: it.join(jobs_of([2 * BLOCK, 9], 3, copies=4)))
    read(rows, 10, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_half_precision_is_rounded_alike(dtype: str) -> None:
    """The weights of the model are float32: both read copies that are rounded once."""
    model = adapted(tiny_model(dtype=dtype))
    rows = rows_of(model)
    each(rows, lambda it: it.join(jobs_of([5, BLOCK, 7], 1)))
    read(rows, 6, 2, model.dtype)


@torch.inference_mode()
def test_rows_that_join_leave_and_return_change_nothing() -> None:
    """A finished row's cache is kept for the prompt that continues it, from shared blocks and from own ones."""
    rows = rows_of(adapted(tiny_model()))
    draw = random.Random(0)
    texts: list[tuple[str | None, tuple[int, ...]]] = []
    for turn in range(5):
        jobs = jobs_of([draw.randrange(2, 150) for _ in range(3)], turn, copies=1 + turn % 3)
        jobs += [Job(name, (*text, 7, 8), Sampling(), 0) for name, text in texts]
        each(rows, lambda it, jobs=jobs: it.join(jobs))  # type: ignore[misc]
        steps = draw.randrange(1, 20)
        read(rows, steps, turn)
        gone = sorted(draw.sample(range(len(rows[0])), len(rows[0]) // 2))
        said = [tuple(draw.randrange(6, 150) for _ in range(2)) for _ in gone]
        texts = [(rows[1]._texts[row][0], rows[1]._texts[row][1]) for row in gone[:2]]
        each(rows, lambda it, gone=gone, said=said: it.leave(gone, said))  # type: ignore[misc]
        order = list(range(len(rows[0])))
        draw.shuffle(order)
        each(rows, lambda it, order=order: it.arrange(sorted(order)))  # type: ignore[misc]
    read(rows, 30, 9)


@torch.inference_mode()
def test_new_weights_are_read_and_recordings_stay() -> None:
    """A recorded step holds no weight, no length and no address of the cache, which is freed as for an update."""
    model, recorder = adapted(tiny_model()), TapeRecorder()
    assert model.flat is not None
    decoder = Decoder(model, 2, recorder_on=lambda _: recorder)
    for turn in range(3):
        rows = decoder._rows, FlatRows(model, model.flat, None, Prefixes(0))
        assert isinstance(rows[0], PagedRows)
        each(rows, lambda it, turn=turn: it.join(jobs_of([3 + 40 * turn, 9, 70], turn)))  # type: ignore[misc]
        read(rows, 9, turn)
        stir(model.bank.parameters("a"), 10 + turn, 0.1)
        decoder.forget("a")
        decoder.release_caches()
    assert recorder.recorded == 1


def test_more_adapters_of_a_higher_rank_and_in_more_layers_find_room() -> None:
    model = tiny_model()
    for name in ("a", "b"):
        model.bank.add(name, Lora(rank=2, targets=("q_proj",)), 0)
        stir(model.bank.parameters(name), 0, 0.1)
    rows = rows_of(model)
    for number in range(4):
        with torch.inference_mode():
            each(rows, lambda it, number=number: it.join(jobs_of([5 + number, 9], number)))  # type: ignore[misc]
            read(rows, 3, number)
        name = f"more{number}"
        model.bank.add(name, Lora(rank=2, targets=MORE[number]) if number < 3 else Lora(rank=9), number)
        stir(model.bank.parameters(name), number, 0.1)
        with torch.inference_mode():
            each(rows, lambda it, name=name: it.join([Job(name, (7, 8, 9), Sampling(), 0)]))  # type: ignore[misc]
            read(rows, 3, number)


def test_an_adapter_that_returns_under_its_name_is_another_one() -> None:
    """It has a lower rank and changes fewer layers."""
    model = adapted(tiny_model())
    assert model.flat is not None
    decoder = Decoder(model, 2, recorder_on=lambda _: None)
    rows = decoder._rows, FlatRows(model, model.flat, None, Prefixes(0))
    for lora in (LORA, Lora(rank=1, targets=("o_proj",))):
        with torch.inference_mode():
            each(rows, lambda it: it.join([Job(name, (7, 8, 9), Sampling(), 0) for name in ("a", "b")]))
            read(rows, 3, lora.rank)
            each(rows, lambda it: it.arrange([]))
        decoder.forget("a")
        model.bank.remove("a")
        model.bank.add("a", lora, 5)
        stir(model.bank.parameters("a"), 5, 0.1)
    with torch.inference_mode():
        each(rows, lambda it: it.join([Job("a", (7, 8, 9), Sampling(), 0)]))
        read(rows, 3, 3)


def test_a_model_with_other_layers_decodes_as_before() -> None:
    model = LanguageModel(build("gpt2"), tokenizer(), "float32", "gpt2")
    assert not isinstance(Decoder(model, recorder_on=nowhere)._rows, PagedRows)
