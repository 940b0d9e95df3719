"""What engines can do is declared by inheriting from a capability; an attribute of that name means nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.episodes import TASK
from tests.support.tiny import sections, tiny_model

from kapelle.engines.rollout.protocol import (
    AllowsInterrupts,
    ChecksItself,
    Completion,
    HasNotes,
    HasQueue,
    Interruptible,
    KnowsAlternatives,
    OnTokens,
    Request,
    ServesCallers,
    notes_of,
    stream_or_generate,
)
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.engines.train.protocol import CountsTokens, Examines, KeepsParts
from kapelle.errors import ConfigError
from kapelle.settings.base import Settings
from kapelle.training.trainer import Trainer
from kapelle.types import Message, Sampling

CAPABILITIES = (
    *(Interruptible, HasNotes, HasQueue, ServesCallers, KnowsAlternatives),
    *(KeepsParts, Examines, CountsTokens),
)
REQUEST = Request("a", "a", (Message("user", "?"),), (1,), Sampling(), 0, TASK)


class Named(ScriptedEngine):
    """An engine with every name that a capability has, for something else."""

    notes = "loud"
    interrupt = serve = stream = alternatives = parts = room = examine = distributions = waiting = None


class Knobs(Settings):
    """Settings of an engine, with fields that are called as capabilities' methods."""

    check: bool = True
    interruptible: bool = False


class Streaming(ScriptedEngine, ServesCallers, HasNotes):
    notes: Sequence[str] = ("a word for the user",)

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        answer = await self.generate(request)
        if on_tokens is not None:
            on_tokens(answer.ids[:-1], answer.logprobs[:-1])
        return answer


def test_names_alone_are_no_capability() -> None:
    engine = Named({"a": lambda _: "words"})
    assert not any(isinstance(engine, capability) for capability in CAPABILITIES)
    assert notes_of(engine) == ()
    heard: list[object] = []
    answer = asyncio.run(stream_or_generate(engine, REQUEST, lambda *some: heard.append(some)))
    assert (answer.text, heard) == ("words", [])
    assert not isinstance(Knobs(), AllowsInterrupts | ChecksItself)


def test_what_is_declared_is_used() -> None:
    engine, heard = Streaming({"a": lambda _: "words"}), list[int]()
    engine.serve()  # it need not be written: nothing waits for another
    answer = asyncio.run(stream_or_generate(engine, REQUEST, lambda ids, _: heard.extend(ids)))
    assert (answer.text, bytes(heard)) == ("words", b"word")
    assert notes_of(engine) == ("a word for the user",)


def test_a_run_says_before_it_begins_what_its_engine_lacks() -> None:
    class Half(ScriptedEngine, Interruptible):
        pass

    with pytest.raises(ConfigError, match="has no `interrupt`"):
        Trainer(**sections(model=tiny_model()), engine=Half({}))
