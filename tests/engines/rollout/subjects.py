"""The rollout engines that the contract suite asks, each with what its protocol declares and a way to break it."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from tests.engines.rollout.vllm.stand_in import Substitute
from tests.engines.rollout.vllm.stand_in_server import Serving
from tests.support.tiny import LORA, lora_policies, stir, tiny_model
from torch import Tensor

from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.settings import Local
from kapelle.engines.rollout.protocol import Request, RolloutEngine
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.engines.rollout.vllm.engine import VllmEngine
from kapelle.engines.rollout.vllm.settings import Vllm
from kapelle.models.language_model import LanguageModel
from kapelle.team import Endpoint, Policy

NAMES = ("a", "b", "still")
POLICIES = [*lora_policies("a", "b"), Policy("still", trained=False)]
WORDS = "so it is, and so it was before; who would have thought that it ends here?"


@dataclass(frozen=True)
class Subject:
    """An engine that plays the policies of `NAMES`."""

    engine: RolloutEngine
    breaking: Callable[[], AbstractContextManager[None]]
    """While it is open, sampling fails."""
    close: Callable[[], None] = lambda: None
    """Ends what was started beside the engine."""


@dataclass(frozen=True)
class Kind:
    """What an engine declares, and how one is made."""

    make: Callable[[], Subject]
    weights: bool = False
    """It samples from weights that it is given: `a` and `b` are adapters, `still` their bare base."""
    samples: bool = True
    """Its answers depend on seeds and obey limits and stops; a script answers as it was written."""
    cuts: bool = True
    """Its log-probs are those of what top-k and top-p leave."""
    holds: bool = False
    """It holds completions to a form, and its log-probs are those over what was allowed."""
    breaks_off: bool = False
    """Its requests can be put on hold and continued."""
    repeats: bool = False
    """A request that was on hold has the tokens that it would have had otherwise."""
    marks: Sequence[pytest.MarkDecorator] = ()


def bare() -> LanguageModel:
    """Return the base of the policies without adapters, in a shape that vLLM computes too."""
    return tiny_model(size=0.2, hidden=64)


def base() -> LanguageModel:
    """Return the base of the policies as the train engine leaves it: with their adapters, none of which does nothing."""
    model = bare()
    for seed, policy in enumerate(POLICIES):
        if policy.lora is not None:
            model.bank.add(policy.name, LORA, seed)
            stir(model.bank.parameters(policy.name), seed)
    return model


def own_weights() -> dict[str, Mapping[str, Tensor]]:
    """Return the weights with which the policies of a fresh engine begin."""
    return dict(_own_weights())


@cache
def _own_weights() -> Mapping[str, Mapping[str, Tensor]]:
    model = base()
    return {p.name: model.bank.parameters(p.name) if p.lora else model.base_parameters() for p in POLICIES}


def local() -> Subject:
    @contextmanager
    def breaking() -> Iterator[None]:
        with patch.object(Decoder, "advance", side_effect=RuntimeError("out of memory")):
            yield

    return Subject(Local().build({"base": base()}, POLICIES), breaking)


def vllm_stand_in() -> Subject:
    @contextmanager
    def breaking() -> Iterator[None]:
        with patch.object(Substitute, "step", side_effect=RuntimeError("out of memory")):
            yield

    folder = Path(tempfile.mkdtemp())
    return Subject(VllmEngine({"base": base()}, POLICIES, Substitute, folder), breaking)


def sglang_server_stand_in() -> Subject:
    return vllm_server_stand_in(sglang=True)


def vllm_server_stand_in(*, sglang: bool = False) -> Subject:
    serving = Serving(sglang=sglang)

    @contextmanager
    def breaking() -> Iterator[None]:
        serving.servers[-1].broken = True
        yield
        serving.servers[-1].broken = False

    folder = Path(tempfile.mkdtemp())
    return Subject(VllmEngine({"base": base()}, POLICIES, serving, folder), breaking, serving.close)


def vllm() -> Subject:
    from kapelle.engines.rollout.vllm.sampler import InProcess

    @contextmanager
    def breaking() -> Iterator[None]:
        with patch.object(InProcess, "step", side_effect=RuntimeError("out of memory")):
            yield

    return Subject(Vllm(kv_gib=0.05).build({"base": base()}, POLICIES), breaking)


class ChatServer:
    """A server as an endpoint's users have one: its text depends on conversation, model and seed; it obeys limits and stops."""

    broken = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            return httpx.Response(503)
        asked = json.loads(request.content)
        drawn = random.Random(json.dumps([asked["seed"], asked["model"], asked["messages"]]))
        text = "".join(drawn.choices(WORDS, k=drawn.randrange(1, 40)))[: asked["max_tokens"]]
        finish = "length" if len(text) == asked["max_tokens"] else "stop"
        for stop in asked.get("stop", ()):
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        return httpx.Response(200, json={"choices": [choice]})


def endpoint() -> Subject:
    server = ChatServer()

    @contextmanager
    def breaking() -> Iterator[None]:
        server.broken = True
        yield
        server.broken = False

    endpoints = {name: Endpoint("https://example.test/v1", name) for name in NAMES}
    return Subject(EndpointEngine(endpoints, transport=httpx.MockTransport(server.answer)), breaking)


def scripted() -> Subject:
    broken: list[bool] = []

    def script(request: Request) -> str:
        if broken:
            raise RuntimeError("a script of somebody else's")
        return f"{request.policy} says {request.seed}"

    @contextmanager
    def breaking() -> Iterator[None]:
        broken.append(True)
        yield
        broken.clear()

    return Subject(ScriptedEngine(dict.fromkeys(NAMES, script)), breaking)


KINDS: Mapping[str, Kind] = {
    "local": Kind(local, weights=True, holds=True, breaks_off=True, repeats=True),
    "stand-in for vllm": Kind(vllm_stand_in, weights=True, holds=True, breaks_off=True),
    "stand-in for a vllm server": Kind(vllm_server_stand_in, weights=True, holds=True),
    "stand-in for an SGLang server": Kind(sglang_server_stand_in, weights=True, cuts=False),
    "vllm": Kind(vllm, weights=True, holds=True, breaks_off=True, marks=(pytest.mark.vllm,)),
    "endpoint": Kind(endpoint),
    "scripted": Kind(scripted, samples=False),
}
