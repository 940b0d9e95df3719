"""Any architecture of `transformers` is shared out block by block, and its own forward pass learns what a whole one learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines.train.fsdp.test_engine import NLL
from tests.models.test_families import PLAYING
from tests.support.families import family_model
from tests.support.ranks import run_ranks
from tests.support.tiny import LORA, frozen_copy, related_samples, same_bits, stir, with_behaviour
from torch import Tensor

from kapelle.engines.train.fsdp import FsdpTrainEngine
from kapelle.engines.train.protocol import TrainEngine, TrainSetup, UpdateLimits
from kapelle.engines.train.settings import Fsdp
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.errors import ConfigError
from kapelle.runtime.rank_group import ranks_here
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Lora, Policy, reference_name

Found = tuple[Mapping[str, Tensor], list[Tensor], list[Tensor]]
"""What was learned, its log-probs, and those of a reference."""


SPLIT = {
    "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi", "gemma", "gemma2", "gemma3_text", "granite", "cohere", "cohere2",
    "hyperclovax", "starcoder2", "smollm3",
}  # fmt: skip
"""Families whose products several processes can compute together."""


def learned(family: str, lora: Lora | None, ranks: Ranks, split: int = 1) -> Found:
    model = family_model(family)
    optimizer, limits = OptimizerConfig(lr=1e-2, eps=1e-4), UpdateLimits(microbatch_tokens=20)
    policy = Policy("a", lora=lora)
    setup = TrainSetup({"base": model}, [policy], [], optimizer, limits, 0, references=True, ranks=ranks)
    engine: TrainEngine = (
        TorchTrainEngine(setup) if ranks is ALONE else FsdpTrainEngine(setup, Fsdp(tensor_parallel=split))
    )
    if lora:
        stir(engine.weights("a"), 1)
    samples = with_behaviour(engine, related_samples(["a"]))
    for _ in range(3):
        engine.update(samples, replace(NLL, parity=False))
    if ranks.rank == 0 and lora is None:  # a sampler reads at its own pace
        with torch.no_grad():
            model.model(input_ids=torch.arange(7)[None], use_cache=False)
    frozen = engine.score([replace(sample, learner=reference_name("a")) for sample in samples])
    return frozen_copy(engine.weights("a")), engine.score(samples), frozen


def learned_here(families: Sequence[str]) -> list[Found]:
    ranks = ranks_here(60.0)
    return [learned(family, lora, ranks) for family in families for lora in (None, LORA)]


def learned_split(families: Sequence[str]) -> list[Found]:
    ranks = ranks_here(60.0)
    return [learned(family, None, ranks, 2) for family in families]


def check_split(families: Sequence[str], ranks: int) -> None:
    for number, found in enumerate(zip(*run_ranks(ranks, learned_split, families), strict=True)):
        weights, scores, frozen = learned(families[number], None, ALONE)
        for here in found:
            assert same_bits(here[0], found[0][0]), families[number]
        here = found[0]
        assert max(float((weights[key] - here[0][key]).abs().max()) for key in weights) < 2e-6, families[
            number
        ]
        for mine, theirs in zip([*scores, *frozen], [*here[1], *here[2]], strict=True):
            assert float((mine - theirs).abs().max()) < 1e-5, families[number]


def refused(families: Sequence[str]) -> list[str]:
    ranks, said = ranks_here(60.0), []
    for family in families:
        try:
            learned(family, None, ranks, 2)
        except ConfigError as error:
            said.append(str(error))
    return said


def check_families(families: Sequence[str]) -> None:
    one, other = run_ranks(2, learned_here, families)
    cases: list[tuple[str, Any]] = [(family, lora) for family in families for lora in (None, LORA)]
    for (family, lora), here, there in zip(cases, one, other, strict=True):
        weights, scores, frozen = learned(family, lora, ALONE)
        assert same_bits(here[0], there[0]), family
        assert max(float((weights[key] - here[0][key]).abs().max()) for key in weights) < 2e-6, family
        for mine, theirs in zip([*scores, *frozen], [*here[1], *here[2]], strict=True):
            assert float((mine - theirs).abs().max()) < 1e-5, family


@pytest.mark.long
@pytest.mark.slow
def test_gpt2_learns_the_same_in_one_and_two_processes() -> None:
    check_families(["gpt2"])


@pytest.mark.ranks
def test_so_does_every_family() -> None:
    check_families(PLAYING)


@pytest.mark.ranks
def test_so_are_those_of_every_family_that_says_how_and_of_two_such_pairs() -> None:
    check_split(sorted(SPLIT), 2)
    check_split(["qwen2", "qwen3"], 4)


@pytest.mark.ranks
def test_models_that_cannot_be_split_are_rejected_by_name() -> None:
    others = [family for family in PLAYING if family not in SPLIT]
    one, other = run_ranks(2, refused, others)
    assert one == other
    assert len(one) == len(others)
    for family, said in zip(others, one, strict=True):
        assert f"`train_engine.tensor_parallel: 2` cannot split '{family}': " in said
