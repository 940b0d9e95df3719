"""How often a GPU is asked: nothing of sampling, updates and publishing grows with rows, cohorts, tokens or samples unnoticed.

A cohort is rows that joined at one time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_work import SHAPES, conversations, decoding, drawn, lengths, names, ours, sampler
from tests.engines.test_on_a_gpu import model_on_device
from tests.support.episodes import TASK
from tests.support.tiny import LORA, SIZE, draw_samples, lora_policies, train_engine, with_behaviour
from tests.twin.cuda import Counts, counted

from kapelle.algorithms.grpo import GRPO
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.local.step_graphs import CudaRecorder, GraphRecorder, nowhere, on_cuda
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.models.adapters import named
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import read_adapter, save_adapter
from kapelle.rows import Sample
from kapelle.team import Lora
from kapelle.types import Sampling

STEPS = 8


def decode_steps(
    rows: int, recorder_on: Callable[[torch.device], GraphRecorder | None] = nowhere, cohorts: int = 1
) -> Counts:
    """Count `STEPS` decode steps of rows that joined in so many cohorts, half of them with another adapter."""
    decoder = Decoder(model_on_device("bfloat16"), 2, recorder_on=recorder_on)
    jobs = [Job("ab"[k % 2], tuple(range(7, 16)), Sampling(max_tokens=70), k) for k in range(rows)]
    for k in range(cohorts):
        decoder.join(jobs[k::cohorts])
        decoder.advance(2)  # the first ones are warmed up and recorded
    with counted() as counts:
        decoder.advance(STEPS)
    return counts


def test_a_decode_step_costs_the_same_for_any_number_of_rows() -> None:
    few, many = decode_steps(4), decode_steps(32)
    assert few == many
    assert many["down"] == STEPS  # which rows ended
    assert not many.keys() & {"up", "waits", "across", "refused"}


def test_a_decode_step_costs_the_same_for_any_number_of_cohorts() -> None:
    one, several = decode_steps(32), decode_steps(32, cohorts=8)
    assert several["launches"] <= 1.02 * one["launches"]  # rows that end are marked
    assert several["down"] + several["waits"] == STEPS
    assert not several.keys() & {"up", "across", "refused"}


def test_a_decode_step_is_one_replay_of_a_graph() -> None:
    for cohorts in (1, 8):
        counts = decode_steps(32, on_cuda, cohorts)
        assert counts["replays"] == STEPS
        assert counts["launches"] <= 40 * STEPS  # draws of tokens and ends
        assert counts["down"] == STEPS


def engine_and_samples(
    samples: int, tokens: int, *, dropout: float = 0.0, most: int = 4096
) -> tuple[TorchTrainEngine, list[Sample]]:
    """Return an engine of two adapters, whose passes have at most so many tokens, and samples of both."""
    engine = train_engine(
        lora_policies("a", "b", lora=replace(LORA, dropout=dropout)),
        models={"base": model_on_device("bfloat16", adapted=False)},
        limits=UpdateLimits(most),
    )
    return engine, with_behaviour(engine, draw_samples(["a", "b"], [(9, tokens)] * (samples // 2)))


def update(samples: int, tokens: int, *, dropout: float = 0.0, most: int = 4096) -> Counts:
    """Count the second update of two adapters; the first one makes the optimisers' moments."""
    engine, drawn = engine_and_samples(samples, tokens, dropout=dropout, most=most)
    objective = Objective(GRPO().build().policy_loss, parity=False)
    engine.update(drawn, objective)
    with counted() as counts:
        engine.update(drawn, objective)
    return counts


def test_an_update_of_one_pass_costs_the_same_for_any_number_of_samples_and_tokens() -> None:
    few, many, long = update(4, 8), update(16, 8), update(16, 32)
    assert few == many == long
    assert many["waits"] + many["down"] <= 2  # what the passes added up, and what became of all steps
    assert many["up"] <= 1  # the batch
    assert not many.keys() & {"across", "refused"}


def test_a_layer_of_an_update_launches_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with two adapters of all linear layers; 14 kernels convert weights that are float32."""
    monkeypatch.setitem(globals(), "LORA", replace(LORA, rank=8))  # smaller ranks are padded
    counts = []
    for layers in (2, 3):
        monkeypatch.setitem(SIZE, "layers", layers)
        counts.append(update(16, 32)["launches"])
    assert counts[1] - counts[0] <= 60 + 14


def test_dropout_costs_one_more_copy_to_the_device() -> None:
    plain, dropped = update(4, 8), update(16, 8, dropout=0.25)
    assert dropped["waits"] + dropped["down"] == plain["waits"] + plain["down"]
    assert dropped["up"] == plain["up"] + 1


def test_an_update_waits_twice_for_any_number_of_passes() -> None:
    counts = update(24, 8, most=64)  # four samples in a pass
    assert counts["waits"] + counts["down"] == 2
    assert counts["up"] == 6


def test_scores_are_read_once_for_any_number_of_samples_and_passes() -> None:
    for samples in (4, 64):
        engine, drawn = engine_and_samples(samples, 8, most=64)
        with counted() as counts:
            engine.score(drawn)
        assert counts["waits"] + counts["down"] == 1


def publish(*, tokens: int, rank: int = 2) -> Counts:
    """Count the publish of two adapters to the engine that samples in their memory, after answers of so many tokens."""
    model = model_on_device("bfloat16", adapted=False)
    policies = lora_policies("a", "b", lora=Lora(rank=rank))
    trainer = train_engine(policies, models={"base": model})
    engine = LocalEngine({"base": model}, policies)

    async def answers() -> None:
        sampling = Sampling(max_tokens=tokens)
        asked = [Request(name, name, (), (7, 8, 9), sampling, k, TASK) for k, name in enumerate("abab")]
        await asyncio.gather(*(engine.generate(request) for request in asked))

    asyncio.run(answers())
    engine.release_caches()  # as a run does before it learns
    with counted() as counts:
        for version, name in enumerate("ab", 1):
            engine.load(name, trainer.weights(name), version)
    return counts


def test_an_adapter_goes_into_a_file_in_one_transfer(tmp_path: Path) -> None:
    model = model_on_device("bfloat16")
    adapter, lora = model.bank.parameters("a"), named(layers_of(model.model), LORA)
    with counted() as counts:
        save_adapter(tmp_path, adapter, lora, "base")
    assert (counts["down"], counts["waits"], counts["launches"]) == (1, 0, 1)
    kept, _ = read_adapter(tmp_path)
    assert all(torch.equal(kept[name], tensor.cpu()) for name, tensor in adapter.items())


def test_a_publish_waits_once_for_each_policy() -> None:
    few, many, wide = publish(tokens=2), publish(tokens=40), publish(tokens=2, rank=16)
    assert few == many == wide
    assert many["down"] + many["waits"] == 2
    assert (
        many["launches"] <= 2 * 20
    )  # words of all tensors together; one by one they would be 28 times as many
    assert not many.keys() & {"across", "refused"}


def test_a_layer_of_a_decode_step_is_fourteen_kernels() -> None:
    """Seven products, and seven kernels between them."""

    def kernels(layers: int) -> int:
        shape = SHAPES["tiny"]._replace(layers=layers)
        decoder = decoding(ours(drawn(shape, "bfloat16", "cuda"), "bfloat16", 2), 2, 8, 16, nowhere)
        decoder.advance(2)
        with counted() as counts:
            decoder.advance(1)
        return counts["launches"]

    assert kernels(3) - kernels(2) == 14


def test_uneven_conversations_replay_a_few_recordings() -> None:
    """Rows of lognormal length come and go in every step, and the caches are freed for an update."""
    engine = sampler(ours(drawn(SHAPES["tiny"], "bfloat16", "cuda"), "bfloat16", 2), 2, on_cuda)
    recorded: list[object] = []
    plain = CudaRecorder.record

    def record(*given: Any) -> Any:
        recorded.append(given)
        return plain(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaRecorder, "record", record)
        for step in range(6):
            conversations(engine, names(2), lengths(24, even=False, median=6, seed=step))
            for version, name in enumerate(names(2), 1):
                engine.load(name, engine.queues[0].model.bank.parameters(name), version + step)
            engine.release_caches()
    assert len(recorded) <= 4
