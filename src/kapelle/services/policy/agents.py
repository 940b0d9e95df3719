"""Answers of one agent: its policy, sampled by the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from kapelle.engines.rollout.protocol import (
    Completion,
    KnowsAlternatives,
    Likeliest,
    Request,
    agent_renderer,
    stream_or_generate,
)
from kapelle.environments.grading.text.tool_call import Form
from kapelle.errors import ContextError, EngineError
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.asked_forms import form_asked
from kapelle.services.policy.chat_form import (
    ChatRequest,
    Head,
    MessageReader,
    message_of,
    token_rows,
    usage_row,
)
from kapelle.services.policy.service_metrics import ServiceMetrics
from kapelle.services.policy.speech import (
    MARKS,
    Speech,
    SpeechForm,
    call_form,
    form_of,
    thought_marks,
    writes_calls,
)
from kapelle.services.refusals import Refusal, wrong
from kapelle.types import Json, Message, Sampling, Task


@runtime_checkable
class Decodes(Protocol):
    """A renderer that turns tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
        ...

    def spoken(self, ids: Sequence[int]) -> str:
        """Return tokens as an agent's text: without special ones."""
        ...


@runtime_checkable
class HasTemplate(Protocol):
    """A renderer with a chat template."""

    template: str
    """Its text."""

    @property
    def takes_tools(self) -> bool:
        """Whether it writes tools, calls of them and their results itself (`Message.structured`)."""
        ...

    def called(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Return how it writes an answer that makes this call; empty where it cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one agent, and how its answers are sampled."""

    agent: str
    messages: tuple[Message, ...]
    """Its whole conversation."""
    ids: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    """One for each choice."""


@dataclass(frozen=True, slots=True)
class News:
    """New tokens of a choice."""

    choice: int
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Done:
    """A complete choice."""

    choice: int
    completion: Completion
    prompt_tokens: int
    turn: int | None = None
    """Its number in its episode; None if no episode is played."""


@dataclass(frozen=True, slots=True)
class Heard:
    """New words of a choice, which may be none yet."""

    choice: int
    thoughts: str
    """What the agent thinks before it speaks."""
    words: str
    tokens: list[Json] | None
    """The tokens that they came with and their log-probs; None unless they are asked for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A complete choice: its words and tokens that were not heard before, and the whole of it."""

    choice: int
    thoughts: str
    words: str
    tokens: list[Json] | None
    message: Mapping[str, Json]
    """As OpenAI's clients read it in a chat completion: `content`, `tool_calls`."""
    reason: str
    """Why it ended."""
    usage: tuple[int, int]
    """How many tokens were read and written."""
    about: Mapping[str, Json]
    """What kapelle says of it beside OpenAI's form."""


Tell = Callable[[Any], None]
"""Passes news on to the listener."""


class Agents:
    """The agents of a team, each asked on its own."""

    def __init__(self, play: Play, thread: LoopThread, form: Form | None = None) -> None:
        """`form` is that of tool calls in place of the one that a chat template is found to have."""
        self.play = play
        self.thread = thread
        self._form = form
        self._told_once: set[str] = set()
        self._readers: dict[str, MessageReader] = {}
        self._texts: dict[str, MarkedTexts | None] = {}
        self.metrics = ServiceMetrics()
        """What they have read and said for callers."""

    def say_once(self, what: str) -> None:
        """Log what callers should know, the first time that it happens."""
        if what not in self._told_once:
            self._told_once.add(what)
            LOG.warning("%s", what)

    def reader(self, agent: str) -> MessageReader:
        """Return how an agent's conversations are read: in the form of its chat template, else as `hermes`."""
        policy = self.play.team.policy(agent).name
        if policy not in self._readers:
            renderer = self.play.engine.renderer(policy)
            template = renderer.template if isinstance(renderer, HasTemplate) else ""
            found = form_of(template)
            form = self._form or found or "hermes"
            # A form that was named is the template's own where that writes calls so, whether signs of it are known or not.
            structured = (
                isinstance(renderer, HasTemplate)
                and renderer.takes_tools
                and (form == found or writes_calls(renderer.called, form))
            )
            self._readers[policy] = MessageReader(form, structured, call_form(form, template))
        return self._readers[policy]

    def texts(self, agent: str) -> MarkedTexts | None:
        """Return how an agent's tokens become texts; None where its engine knows texts alone."""
        policy = self.play.team.policy(agent).name
        if policy not in self._texts:
            renderer = self.play.engine.renderer(policy)
            marks = MARKS[self.reader(agent).form]
            self._texts[policy] = MarkedTexts(renderer, marks) if isinstance(renderer, Decodes) else None
        return self._texts[policy]

    async def answers(self, prompt: Prompt, *, listening: bool) -> AsyncGenerator[News | Done, None]:
        """Yield the choices in order; `listening` yields tokens as they come instead, and each choice when it is complete."""

        async def work(tell: Tell) -> None:
            choices = (self._choice(prompt, k, tell, listening=listening) for k in range(len(prompt.seeds)))
            done = await asyncio.gather(*choices)
            if not listening:
                for each in done:
                    tell(each)

        async with aclosing(told(self.thread, work)) as coming:  # type: ignore[type-var]
            async for each in coming:
                if isinstance(each, Done):
                    self.metrics.spoke(prompt.agent, each.prompt_tokens, len(each.completion.ids))
                yield each

    async def _choice(self, prompt: Prompt, choice: int, tell: Tell, *, listening: bool) -> Done:
        def on_tokens(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            tell(News(choice, ids, logprobs))

        request = self._request(prompt, prompt.seeds[choice])
        completion = await stream_or_generate(self.play.engine, request, on_tokens if listening else None)
        if not all(map(math.isfinite, completion.logprobs)):
            raise Refusal(
                500,
                f"The weights of '{request.policy}' are broken: their log-probs are not finite.",
                None,
                "weights",
            )
        done = Done(choice, completion, len(prompt.ids))
        if listening:
            tell(done)
        return done

    async def alternatives(self, prompt: Prompt, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` likeliest tokens in the place of each id of a completion."""
        if not count:
            return ()
        request = self._request(prompt, 0)

        async def find() -> Sequence[Likeliest]:
            assert isinstance(self.play.engine, KnowsAlternatives), "`read_chat` has asked"
            return self.play.engine.alternatives(request, ids, count)

        return await self.thread.ask(find)

    def _request(self, prompt: Prompt, seed: int) -> Request:
        policy, task = self.play.team.policy(prompt.agent).name, Task("served", prompt.messages[-1].content)
        return Request(policy, prompt.agent, prompt.messages, prompt.ids, prompt.sampling, seed, task)


async def told(
    thread: LoopThread, work: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]]
) -> AsyncIterator[Any]:
    """Run work beside the engine and yield what it tells; closing the iterator cancels the work.

    Raises Refusal if the engine fails.
    """
    here = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    over = object()

    def tell(news: Any) -> None:
        with suppress(RuntimeError):  # the server was closed meanwhile, and its loop with it
            here.call_soon_threadsafe(queue.put_nowait, news)

    task = asyncio.ensure_future(thread.ask(lambda: work(tell)))
    task.add_done_callback(lambda _: tell(over))
    try:
        while (news := await queue.get()) is not over:
            yield news
        try:
            task.result()
        except EngineError as error:
            LOG.error("The engine failed: %s", error)
            raise Refusal(
                503, "The engine that samples failed; the service's log says why.", None, "engine"
            ) from None
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def too_long(message: str) -> Refusal:
    """Return the refusal of a prompt that the model cannot read."""
    return Refusal(400, message, "messages", "context_length_exceeded")


# -------- Tokens as text while they come: whole characters, without what a stop string may still remove


class TextStream:
    """The text of one answer as it grows."""

    def __init__(self, spoken: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Decode by `spoken`."""
        self._spoken = spoken
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []
        self._from = self._read = 0
        """The window of tokens that is decoded again: tokens before it have no effect on what follows."""
        self._text = ""
        self.told = ""
        """What has been told so far."""

    def hear(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return what can be told now."""
        self._ids += ids
        before = self._spoken(self._ids[self._from : self._read])
        now = self._spoken(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self.end(self._text[: len(self._text) - self._held] if self._held else self._text)

    def end(self, text: str) -> str:
        """Return what of the whole text has not been told yet."""
        news = text[len(self.told) :]
        self.told += news
        return news


class SpeechStream:
    """The thoughts and words of one answer as it grows."""

    def __init__(self, text: TextStream, speech: SpeechForm) -> None:
        self._text, self._speech = text, speech
        self._thoughts = self._words = ""

    def hear(self, ids: Sequence[int]) -> tuple[str, str]:
        """Take the next tokens and return the thoughts and words that can be told now."""
        self._text.hear(ids)
        return self._told(*self._speech.heard(self._text.told))

    def end(self, said: Speech) -> tuple[str, str]:
        """Return the thoughts and words of the whole answer that have not been told yet."""
        return self._told(said.thoughts, said.words)

    def _told(self, thoughts: str, words: str) -> tuple[str, str]:
        news = thoughts[len(self._thoughts) :], words[len(self._words) :]
        self._thoughts, self._words = thoughts, words
        return news


class MarkedTexts:
    """A renderer's texts, in which special tokens stand that tell thoughts and calls from words."""

    def __init__(self, decodes: Decodes, marks: Collection[str]) -> None:
        self._decodes = decodes
        self._all = marks
        self._marks: dict[int, str] = {}
        """Token → the mark that it is and that `spoken` drops; empty for every other token."""

    def marked(self, ids: Sequence[int]) -> bool:
        """Return whether texts of these tokens lack a mark."""
        return any(map(self._mark, ids))

    def _mark(self, token: int) -> str:
        if token not in self._marks:
            text = self._decodes.decode([token])
            self._marks[token] = text if text in self._all and not self._decodes.spoken([token]) else ""
        return self._marks[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
        return self._decodes.decode(ids)

    def spell(self, token: int) -> tuple[str, bytes]:
        """Return a token's text and its bytes."""
        text, decodes = self.decode([token]), self._decodes
        return text, decodes.bytes_of(token) if isinstance(decodes, ChatRenderer) else text.encode(
            "utf-8", "surrogatepass"
        )

    def spoken(self, ids: Sequence[int]) -> str:
        """Return tokens as an agent's text, of the special ones the marks alone."""
        if not self.marked(ids):
            return self._decodes.spoken(ids)
        pieces, run = list[str](), list[int]()
        for token in ids:
            if mark := self._mark(token):
                pieces += [self._decodes.spoken(run), mark] if run else [mark]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self._decodes.spoken(run)] if run else pieces)


# -------- One agent's answer to one request: whole, or as the chunks of a stream


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that is being answered."""

    agents: Agents
    request: ChatRequest
    prompt: Prompt
    head: Head
    decodes: MarkedTexts | None
    reader: MessageReader

    async def prompted(self, ids: Callable[[], Sequence[int]] | None = None) -> Chat:
        """Return it with its prompt's tokens: those of `ids`, else of the rendered conversation.

        Refusal (400) if they are too many for the agent's model.
        """
        play, agent = self.agents.play, self.prompt.agent
        renderer = agent_renderer(play.team[agent], play.engine.renderer(play.team.policy(agent).name))
        try:  # long conversations take a while
            known = tuple(await asyncio.to_thread(ids or partial(renderer.start, self.prompt.messages)))
        except ContextError as error:
            raise too_long(str(error)) from None
        if not known:
            raise wrong(
                "The prompt has no token, and the agent continues one at least. Write something.", "messages"
            )
        room = renderer.context - len(known)
        if room <= 0:
            raise too_long(
                f"The prompt has {len(known):,} tokens; the agent's model reads {renderer.context:,}."
            )
        sampling = self.prompt.sampling
        seed = secrets.randbits(62) if self.request.seed is None else self.request.seed
        seeds = (seed, *(derive_seed(seed, "choice", k) for k in range(1, self.request.n)))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return replace(self, prompt=replace(self.prompt, ids=known, sampling=sampling, seeds=seeds))

    async def whole(self, answers: AsyncIterator[News | Done]) -> Json:
        """Return the answer."""
        ended = [each async for each in self.heard(answers) if isinstance(each, Ended)]
        choices = [
            {
                "index": k,
                "message": each.message,
                "logprobs": _rows(each.tokens),
                "finish_reason": each.reason,
            }
            for k, each in enumerate(ended)
        ]
        about = ended[0].about
        return {
            **self.head.row("chat.completion"),
            "choices": choices,
            "usage": _usage(ended),
            "system_fingerprint": about["weights_hash"],
            "kapelle": {**about, **self.head.extra},
        }

    async def chunks(self, answers: AsyncIterator[News | Done]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces."""
        ended: list[Ended] = []
        for k in range(self.request.n):
            yield self.head.opening(k)
        async with aclosing(self.heard(answers)) as coming:
            async for each in coming:
                k, rows = each.choice, _rows(each.tokens)
                if isinstance(each, Heard):
                    if each.thoughts:
                        yield self.head.chunk(k, {"reasoning_content": each.thoughts}, rows)
                        rows = None if rows is None else _rows([])
                    if each.words or (rows is not None and not each.thoughts):
                        yield self.head.chunk(k, {"content": each.words}, rows)
                    continue
                # The rest of a choice: its words, and then each call in a piece of its own, as OpenAI sends them: some clients
                # read only the first one of a piece.
                ended.append(each)
                calls: list[dict[str, Json]] = [
                    {"tool_calls": [{"index": n, **call}]}
                    for n, call in enumerate(each.message.get("tool_calls", ()))
                ]
                none = None if rows is None else _rows([])
                if each.thoughts:
                    yield self.head.chunk(k, {"reasoning_content": each.thoughts}, rows)
                    rows = none
                for delta in [*([{"content": each.words}] if each.words or not calls else []), *calls]:
                    yield self.head.chunk(k, delta, rows)
                    rows = none
                yield self.head.chunk(k, {}, none, each.reason, each.about)
        if self.request.wants_usage:
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": _usage(ended)}
        yield "[DONE]"

    async def heard(self, answers: AsyncIterator[News | Done]) -> AsyncGenerator[Heard | Ended, None]:
        """Yield the words of the answer as they come, and each choice when it is complete."""
        stops, speech = self.prompt.sampling.stop, self.speech
        words = {
            k: SpeechStream(TextStream(self.decodes.spoken, stops), speech)
            for k in range(self.request.n)
            if self.decodes is not None
        }
        told = [0] * self.request.n
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                k = each.choice
                if isinstance(each, News):
                    told[k] += len(each.ids)
                    new = words[k].hear(each.ids) if k in words else ("", "")
                    yield Heard(k, *new, self._tokens(each.ids, each.logprobs))
                    continue
                completion = each.completion
                said = self.said(completion.ids, completion.text)
                reason = "tool_calls" if said.calls else completion.finish_reason
                left = words[k].end(said) if k in words else (said.thoughts, said.words)
                # `top_logprobs` are asked for only where nothing was told before.
                others = await self.agents.alternatives(
                    self.prompt, completion.ids, self.request.top_logprobs
                )
                rows = self._tokens(completion.ids[told[k] :], completion.logprobs[told[k] :], others)
                usage = each.prompt_tokens, len(completion.ids)
                about = {"version": completion.version, "weights_hash": completion.weights_hash}
                yield Ended(k, *left, rows, message_of(said), reason, usage, about)

    @property
    def speech(self) -> SpeechForm:
        """How its answers are read."""
        request = self.request
        opening = "" if self.decodes is None else self.decodes.decode(self.prompt.ids[-8:])
        # An answer that is held to a form has no room for thoughts.
        opened = tuple(mark for mark, _ in thought_marks(self.reader.form))
        thinking = opening.rstrip().endswith(opened) and self.prompt.sampling.constraint is None
        schemas = [tool.function.model_dump() for tool in request.tools]
        return SpeechForm(self.reader.form, request.calls_tools, thinking, schemas)

    def said(self, ids: Sequence[int], text: str) -> Speech:
        """Return what an answer says, whose text may lack the special tokens that tell thoughts and calls from words."""
        if isinstance(self.decodes, MarkedTexts) and self.decodes.marked(ids):
            text = self.decodes.spoken(ids)
            for stop in self.prompt.sampling.stop:
                text = text.partition(stop)[0]
        return self.speech.read(text)

    def _tokens(
        self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Likeliest] = ()
    ) -> list[Json] | None:
        """Return sampled tokens with their log-probs; None unless they are asked for."""
        if self.decodes is None or not self.request.logprobs:
            return None
        return token_rows(ids, logprobs, self.decodes.spell, alternatives)


def _rows(tokens: list[Json] | None) -> Json:
    return None if tokens is None else {"content": tokens}


def _usage(ended: Sequence[Ended]) -> Json:
    """Return how many tokens were read, once for all choices, and written."""
    return usage_row(ended[0].usage[0], sum(each.usage[1] for each in ended))


_ENDS: Mapping[Form, tuple[str, ...] | None] = {
    "hermes": ("</tool_call>",),
    "glm": ("</tool_call>",),
    "qwen_coder": ("</tool_call>",),
    "deepseek": ("<｜tool▁call▁end｜>",),
    "harmony": (),
}
"""Form → what an answer ends with after its first call; nothing where a turn has one call anyway."""


def ends_of_one_call(request: ChatRequest, form: Form) -> tuple[str, ...]:
    """Return what ends an answer that may call one tool alone; Refusal (400) where calls have no end of their own."""
    if request.parallel_tool_calls or not request.calls_tools:
        return ()
    ends = _ENDS.get(form)
    if ends is None:
        raise wrong(
            f"`parallel_tool_calls: false` cannot be held in the form `{form}`, in which all calls are one list.",
            "parallel_tool_calls",
        )
    return ends


def read_chat(agents: Agents, model: str, agent: str, request: ChatRequest) -> Chat:
    """Return a chat that lacks only its prompt's tokens; Refusal (400) for what cannot be asked of the agent."""
    if request.logprobs and agents.texts(agent) is None:
        raise wrong(
            f"The tokens of '{agent}' are not known here, and so neither are their log-probs.", "logprobs"
        )
    if request.top_logprobs and not request.logprobs:
        raise wrong("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    if request.top_logprobs and request.stream:
        raise wrong(
            "`top_logprobs` are known when an answer is complete. Leave out `stream`.", "top_logprobs"
        )
    if request.top_logprobs and not (
        agents.thread.begun.is_set() and isinstance(agents.play.engine, KnowsAlternatives)
    ):
        raise wrong("What the agents might have said instead is not known here.", "top_logprobs")
    tools = request.tools if request.calls_tools else ()
    for name in request.without_effect:
        agents.say_once(f"`{name}` was asked for and has no effect: agents speak as they have learned to.")
    known, reader = agents.play.team[agent], agents.reader(agent)
    messages = tuple(reader.conversation(request.messages, tools, known.system))
    sampling = request.sampling(known.sampling)
    asked = form_asked(request, reader, agents.play, agent)
    if asked is not None:
        sampling = replace(sampling, constraint=asked)
    else:
        sampling = replace(sampling, stop=(*sampling.stop, *ends_of_one_call(request, reader.form)))
    prompt = Prompt(agent, messages, (), sampling, ())
    return Chat(agents, request, prompt, Head(model), agents.texts(agent), reader)
