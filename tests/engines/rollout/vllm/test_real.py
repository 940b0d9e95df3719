"""vLLM itself, in an environment of its own (`make test-vllm`): what it gets wrong, and that no run continues with it.

The contract suite is asked of it too: `test_contract.py`.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.rollout.subjects import NAMES, POLICIES, bare, base, own_weights
from tests.engines.rollout.test_contract import WAYS, ask, ask_for, assert_true, words
from tests.engines.test_constraints import EVERY, cosine, gradients, policy_of
from tests.features.ahead.test_asynchronous import check_ages, check_tasks
from tests.features.ahead.test_asynchronous import settings as asynchronous
from tests.features.league.test_league import game
from tests.support.tiny import SIZE, frozen_copy, sections, stir, train_engine
from tokenizers import AddedToken
from torch import Tensor
from transformers import GenerationConfig

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.engines.rollout.vllm.engine import VllmPolicy, WeightFiles, base_model
from kapelle.engines.rollout.vllm.sampler import (
    AdapterFile,
    FinishedRow,
    InProcess,
    Row,
    start_in_process,
)
from kapelle.engines.rollout.vllm.served import ServedModel
from kapelle.engines.rollout.vllm.settings import Vllm, installed, mixes_rightly
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.errors import EngineError, ParityError
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.rows import Column, Sample
from kapelle.runtime.constraints import forced_call
from kapelle.settings.schema import ModelConfig
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer
from kapelle.types import Constraint, Message, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = (7, 100, 8, 33, 12)
START = partial(start_in_process, 0.05, 64, {})
ENGINE = {"name": "vllm", "kv_gib": 0.05}
MODEL = {"embedded": {**SIZE, "hidden": 64}}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcess, dict[str, VllmPolicy]]]:
    """vLLM on the contract's base, and its policies."""
    files, model = WeightFiles(tmp_path_factory.mktemp("files")), base()
    policies = {policy.name: files.begin(policy, model) for policy in POLICIES}
    sampler = START(base_model(model, str(files.model(model, model.base_parameters())), list(POLICIES)))
    assert isinstance(sampler, InProcess)
    yield sampler, policies
    sampler.close()


def sampled(sampler: InProcess, adapters: Sequence[AdapterFile | None]) -> list[FinishedRow]:
    for k, adapter in enumerate(adapters):
        sampler.add(Row(str(k), PROMPT, Sampling(max_tokens=5), k, adapter))
    found: dict[str, FinishedRow] = {}
    while len(found) < len(adapters):
        found |= {row.id: row for row in sampler.step()}
    return [found[str(k)] for k in range(len(adapters))]


def gap(policy: str, row: FinishedRow, weights: Mapping[str, Tensor] | None = None) -> float:
    """Return the greatest |log-prob − that of transformers| of a row's tokens, with other `weights` of the base or its own."""
    model, adapter = bare(), None
    if weights is not None:
        copy_weights(model.base_parameters(), weights, "the base")
    if policy != "still":
        model.bank.add(policy, POLICIES[0].lora, 0)  # type: ignore[arg-type]
        model.bank.fill(policy, own_weights()[policy])
        adapter = policy
    tokens = torch.tensor([(*PROMPT, *row.ids)])
    with torch.no_grad(), model.computing([(adapter, 0, 1)]):
        logp_LV = model.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    expected_T = torch.stack([logp_LV[len(PROMPT) + k - 1, token] for k, token in enumerate(row.ids)])
    return float((expected_T - torch.tensor(row.logprobs)).abs().max())


def test_whether_rows_may_be_mixed_is_as_the_table_says(
    held: tuple[InProcess, dict[str, VllmPolicy]],
) -> None:
    """Where it fails, this version does better or worse than `settings.MIXES_RIGHTLY` says."""
    sampler, policies = held
    alone = sampled(sampler, [None, None])
    adapters = sampled(sampler, [policies["a"].adapter, policies["b"].adapter])
    assert max(gap("still", row) for row in alone) <= 1e-4
    assert max(gap(name, row) for name, row in zip("ab", adapters, strict=True)) <= 1e-4
    mixed = sampled(sampler, [policies[name].adapter for name in NAMES])
    assert max(gap(name, row) for name, row in zip("ab", mixed, strict=False)) <= 1e-4
    assert (gap("still", mixed[2]) <= 1e-4) == mixes_rightly(installed(), "cpu")


def test_a_base_loads_other_weights_while_it_runs(held: tuple[InProcess, dict[str, VllmPolicy]]) -> None:
    """From memory and from a file, as workers in processes of their own read it; adapters are on the new base then."""
    sampler, policies = held
    adapters = [policies["a"].adapter, policies["b"].adapter]
    first, files = own_weights()["still"], WeightFiles(Path(tempfile.mkdtemp()))
    new = {name: tensor.detach() * (0.7 if tensor.ndim == 2 else 1.2) for name, tensor in first.items()}
    folder = files.model(policies["still"].model, new)
    for given in ((None, new), (None, first), (str(folder),)):
        sampler._engine.collective_rpc("take_weights", args=given)
        sampler.forget_prefixes()
        weights = first if given[-1] is first else new
        (bare_row,) = sampled(sampler, [None])
        assert gap("still", bare_row, weights) <= 1e-4
        for name, row in zip("ab", sampled(sampler, adapters), strict=True):
            assert gap(name, row, weights) <= 1e-4
        other = new if weights is first else first
        assert gap("still", bare_row, other) > 0.05, "the two bases differ"
    assert sampler.take(first, lambda: folder)
    files.close()


# -------- Completions of a given form

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 22]}}}}
FORMS = [*EVERY.values(), forced_call([TOOL]), None]
SPEAKERS = ("p", "q")


def with_markers(folder: Path) -> LanguageModel:
    """Return a base whose tokeniser has what Qwen's has: markers of calls that are one token, and a second end of turns."""
    model = bare()
    markers = [AddedToken(each, special=False) for each in ("<tool_call>", "</tool_call>")]
    model.tokenizer.add_tokens(markers)
    model.model.resize_token_embeddings(len(model.tokenizer) + 9, mean_resizing=False)
    with torch.no_grad():
        for weight in {id(p): p for p in model.model.parameters() if p.ndim == 2}.values():
            weight.copy_(
                0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight)))
            )
    ends = [model.tokenizer.eos_token_id, model.tokenizer.convert_tokens_to_ids("<|tool|>")]
    model.model.generation_config = GenerationConfig(eos_token_id=ends)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    read = load_language_model(ModelConfig(path=str(folder)))
    assert len(read.end_ids) == 2
    return read


def sampled_in_forms(
    trainer: TorchTrainEngine, model: LanguageModel, requests: Sequence[Request], server: str = ""
) -> list[Completion]:
    policies = [policy_of(name) for name in SPEAKERS]
    engine = Vllm(kv_gib=0.05, server=server).build({"base": model}, policies)
    try:
        for name in SPEAKERS:
            engine.load(name, dict(trainer.learners[name].parameters), 1)
        return asyncio.run(ask(engine, requests))
    finally:
        engine.close()


def asked_in_forms(model: LanguageModel, count: int = 3) -> list[Request]:
    prompt = model.renderer.start([Message("user", "?")])
    return [
        replace(
            ask_for(name, seed, Sampling(max_tokens=60, temperature=0.8, constraint=form)), prompt_ids=prompt
        )
        for seed, (form, name) in enumerate(product(FORMS * count, SPEAKERS))
    ]


def samples(requests: Sequence[Request], answers: Sequence[Completion]) -> list[Sample]:
    return [
        Sample(
            request.policy,
            (*request.prompt_ids, *answer.ids),
            tuple(range(len(request.prompt_ids), len(request.prompt_ids) + len(answer.ids))),
            {Column.BEHAVIOUR: torch.tensor(answer.logprobs)},
            temperature=request.sampling.temperature,
            constraint=answer.constraint,
            begin=len(request.prompt_ids),
        )
        for request, answer in zip(requests, answers, strict=True)
    ]


@pytest.mark.parametrize("server", ["", "start"], ids=["in process", "server"])
def test_the_trainer_scores_completions_in_a_form(server: str, tmp_path: Path) -> None:
    """Two adapters and free rows in one batch; markers are single tokens, and either end ends a turn."""
    model = with_markers(tmp_path)
    trainer = train_engine([policy_of(name) for name in SPEAKERS], models={"base": model})
    requests = asked_in_forms(model)
    answers = sampled_in_forms(trainer, model, requests, server)
    rows = samples(requests, answers)
    assert trainer.check_parity(rows)["parity/max"] < 1e-4
    held = [row for row in rows if row.constraint is not None]
    with pytest.raises(ParityError, match="from another distribution"):
        trainer.check_parity([replace(row, constraint=None) for row in held])
    ended = [answer for answer in answers if answer.finish_reason == "stop" and answer.constraint]
    assert {answer.ids[-1] for answer in ended} == model.end_ids
    markers = {model.tokenizer.convert_tokens_to_ids(each) for each in ("<tool_call>", "</tool_call>")}
    assert markers & {token for answer in ended for token in answer.ids}


def test_the_expected_gradient_of_what_is_sampled_is_that_of_the_expected_return() -> None:
    """Every completion that is allowed is sampled, and weighed by the probability that vLLM says."""
    texts, returns = ["a", "ab", "ba", "bb", "c"], [1.0, -0.5, 2.0, 0.25, -1.0]
    form = Constraint.choices(texts)
    trainer = train_engine([policy_of(name) for name in SPEAKERS], models={"base": bare()})
    model = trainer.model_of("p")
    prompt = model.renderer.start([Message("user", "?")])
    sampling = Sampling(constraint=form)
    asked = [replace(ask_for("p", seed, sampling), prompt_ids=prompt) for seed in range(300)]
    answers = sampled_in_forms(trainer, model, asked)
    said = {answer.ids: sum(answer.logprobs) for answer in answers}
    assert {model.renderer.spoken(ids) for ids in said} == set(texts)
    assert sum(map(math.exp, said.values())) == pytest.approx(1.0, abs=1e-5)
    exact, masked, unmasked = gradients(form, texts, returns, trainer, said)
    for name, expected in exact.items():
        torch.testing.assert_close(masked[name], expected, rtol=1e-3, atol=1e-4)
    assert cosine(masked, exact) > 1 - 1e-6
    assert cosine(unmasked, exact) < 0.99


def trained(steps: int, publish: str = "in_place", **over: Any) -> list[float]:
    """Return the greatest parity gap of each step of a tiny run."""
    config = {**sections(model=MODEL, **over), "engine": {**ENGINE, "publish": publish}}
    with Trainer(resolve(config)) as trainer:
        return [step.metrics["parity/max"] for step in trainer.steps(steps)]


WHOLE: dict[str, Any] = {"team": {"agents": 2, "sharing": "shared", "sampling": {"max_tokens": 4}}}
"""All weights of the base learn."""


@pytest.mark.parametrize(
    ("over", "publish"),
    [({}, "in_place"), (WHOLE, "in_place"), (WHOLE, "restart")],
    ids=["adapters", "whole model", "whole model, restarted"],
)
def test_a_run_continues_with_every_publish(
    over: dict[str, Any], publish: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert max(trained(3, publish, **over)) <= 1e-4
    assert "restarted" not in caplog.text


@pytest.mark.parametrize("sharing", ["lora", "shared"])
def test_an_asynchronous_run_continues_completions_with_new_weights(sharing: str, tmp_path: Path) -> None:
    chosen = asynchronous()
    team = {**chosen["team"], "sharing": sharing}
    if sharing == "shared":
        team.pop("lora")
    with Trainer(
        **{**chosen, "team": team, "model": MODEL, "engine": ENGINE}, run_dir=tmp_path / "run"
    ) as trainer:
        steps = list(trainer.steps())
        check_tasks(trainer, steps)
    check_ages(steps)


def test_a_league_samples_past_selves_as_adapters(tmp_path: Path) -> None:
    """Two past selves and the frozen base are sampled as they are; a run that was broken off continues alike."""
    league = {"population": "fictitious", "enter": {"every": 1}, "slots": 2, "members": {"base": "frozen"}}
    settings = {**game(model=MODEL, league=league), "engine": ENGINE}
    met: set[str] = set()
    with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
        for step in whole.steps(4):
            met |= {cast.player for group in step.groups for cast in group.task.cast.values()}
            assert max(step.metrics["parity/max"], step.metrics["league/parity"]) <= 1e-4
        expected = frozen_copy(whole.engine.weights("player"))
    assert {"base", "self@1", "self@2"} <= met
    with Trainer(**settings, run_dir=tmp_path / "again") as first:
        first.train(2)
    with Trainer(**settings, run_dir=tmp_path / "again", resume=True) as second:
        second.train(2)
        again = frozen_copy(second.engine.weights("player"))
    for name, weights in expected.items():
        torch.testing.assert_close(again[name], weights)


def test_parity_stops_a_run_whose_adapters_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    add = InProcess.add
    monkeypatch.setattr(InProcess, "add", lambda self, row: add(self, replace(row, adapter=None)))
    with pytest.raises(ParityError):
        trained(3)


def test_a_started_server_loads_a_whole_model_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    engine = Vllm(kv_gib=0.05, server="start").build({"base": base()}, POLICIES)
    try:
        (queue,) = engine.queues.values()
        first, weights = queue.sampler, own_weights()
        weights["still"] = {name: 0.7 * tensor.detach() for name, tensor in weights["still"].items()}
        engine.load("still", weights["still"], 1)
        (answer,) = asyncio.run(ask(engine, [ask_for("still")]))
        assert_true(weights, ask_for("still"), answer)
        assert queue.sampler is first, caplog.text
    finally:
        engine.close()


def test_a_server_that_is_started_samples_a_run(tmp_path: Path) -> None:
    """Adapters are loaded and forgotten while it runs; a row that it rejects fails alone; it ends with the engine."""
    engine = Vllm(kv_gib=0.05, server="start").build({"base": base()}, POLICIES)
    try:
        weights = own_weights()
        for version in (0, 1):
            requests = [ask_for(NAMES[k % 3], k, sampling) for k, sampling in enumerate(WAYS.values())]
            answers = asyncio.run(ask(engine, requests))
            for request, answer in zip(requests, answers, strict=True):
                assert answer.version == (version if request.policy == "b" else 0)
                assert_true(weights, request, answer)
            assert words(asyncio.run(ask(engine, requests))) == words(answers)
            weights["b"] = frozen_copy(weights["b"])
            stir(weights["b"], 71 + version)
            engine.load("b", weights["b"], version + 1)
        long = replace(ask_for("a"), prompt_ids=tuple(range(10, 200)) * 2)
        with pytest.raises(EngineError, match="HTTP 400"):
            asyncio.run(ask(engine, [long]))
        assert asyncio.run(ask(engine, [ask_for("a")]))
        (served,) = [queue.sampler for queue in engine.queues.values()]
        assert isinstance(served, ServedModel)
        assert served._process is not None
        assert served._process.poll() is None
    finally:
        engine.close()
    assert served._process.poll() is not None
