"""Generates completions of a single agent. The rollout engine samples these completions in one batch with all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from kapelle.engines.rollout.compose import engine_of
from kapelle.engines.rollout.protocol import (
    Completion,
    KnowsAlternatives,
    Likeliest,
    ReadsPrompts,
    Renderer,
    Request,
    stream_or_generate,
)
from kapelle.environments.grading.text.tool_call import Form
from kapelle.errors import ContextError, EngineError, EpisodeError, RequestRefused
from kapelle.models.chat_template import template_variables
from kapelle.models.renderer import ChatRenderer
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import agent_renderer
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.chat_form import (
    ChatRequest,
    Finished,
    Head,
    MessageReader,
    Piece,
    message_of,
    token_rows,
)
from kapelle.services.policy.requested_forms import check_length, constraint_of
from kapelle.services.policy.service_metrics import ServiceMetrics
from kapelle.services.policy.speech import (
    MARKS,
    ParsedAnswer,
    SpeechForm,
    call_form,
    form_of,
    thought_marks,
    writes_calls,
)
from kapelle.services.request_errors import RequestError, wrong
from kapelle.types import Json, Message, Sampling, Task
from kapelle.workflow import instructions


@runtime_checkable
class Decodes(Protocol):
    """The interface of a renderer that converts tokens to text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, in which special tokens are written out."""
        ...

    def spoken(self, ids: Sequence[int]) -> str:
        """Decode tokens to the text of an agent, without special tokens."""
        ...


@runtime_checkable
class HasTemplate(Protocol):
    """The interface of a renderer with a chat template."""

    template: str
    """The source of the chat template."""

    @property
    def takes_tools(self) -> bool:
        """Whether the template itself formats tools, tool calls and their results (see `Message.structured`)."""
        ...

    def called(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Return the text in which the template formats the given tool call, or an empty string if it is unknown."""
        ...


ENDPOINT = MessageReader(structured=True, calls=None, is_endpoint=True)
"""The message reader for endpoints, which receive and return messages in OpenAI's format."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one agent, and the parameters for sampling its completions."""

    agent: str
    messages: tuple[Message, ...]
    """The messages of the whole conversation."""
    ids: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    """The seeds, one for each choice."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of a choice."""

    choice: int
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a complete choice."""

    choice: int
    completion: Completion
    prompt_tokens: int
    turn: int | None = None
    """The index of the turn in its episode, or None if there is no episode."""

    @property
    def usage(self) -> tuple[int, int]:
        """The numbers of prompt tokens and completion tokens, as counted by the server of an endpoint if it reported them."""
        return self.completion.usage or (self.prompt_tokens, len(self.completion.ids))


Send = Callable[[Any], None]
"""A function that passes an item to the code that waits for it."""


class Agents:
    """The agents of a team, each of which can be called individually."""

    def __init__(self, setup: RolloutSetup, thread: LoopThread, form: Form | None = None) -> None:
        """Create the agents. The argument `form` is the format of tool calls; if None, the format is detected from the chat template."""
        self.setup = setup
        self.thread = thread
        self._form = form
        self._warned: set[str] = set()
        self._readers: dict[str, MessageReader] = {}
        self._texts: dict[str, MarkedTexts | None] = {}
        self.metrics = ServiceMetrics()
        """Counts of the tokens in the prompts and completions of the agents."""

    def warn_once(self, what: str) -> None:
        """Log a warning, but only the first time it occurs."""
        if what not in self._warned:
            self._warned.add(what)
            LOG.warning("%s", what)

    def reader(self, agent: str) -> MessageReader:
        """Return the message reader for an agent.

        The reader uses the format of the agent's chat template, or the format `hermes` by default.
        """
        known = self.setup.team.policy(agent)
        policy = known.name
        if known.endpoint is not None and self._form is None:
            return ENDPOINT
        if policy not in self._readers:
            renderer = self.setup.engine.renderer(policy)
            template = renderer.template if isinstance(renderer, HasTemplate) else ""
            found = form_of(template)
            form = self._form or found or "hermes"
            # A format that the user has chosen counts as the template's own if the template writes calls in it.
            structured = (
                isinstance(renderer, HasTemplate)
                and renderer.takes_tools
                and (form == found or writes_calls(renderer.called, form))
            )
            calls = call_form(form, template)
            # A format that this module knows is parsed more strictly, and its calls can be forced and streamed.
            described = None
            if found is None and self._form is None and isinstance(renderer, ChatRenderer):
                described = getattr(renderer.tokenizer, "response_template", None)
                if described and renderer.takes_tools and writes_calls(renderer.called, form, described):
                    structured, calls = True, None
                else:
                    described = None
            self._readers[policy] = MessageReader(form, structured, calls, described)
        return self._readers[policy]

    def texts(self, agent: str) -> MarkedTexts | None:
        """Return the object that decodes the tokens of an agent, or None for engines without tokens."""
        policy = self.setup.team.policy(agent).name
        if policy not in self._texts:
            renderer = self.setup.engine.renderer(policy)
            marks = MARKS[self.reader(agent).form]
            self._texts[policy] = MarkedTexts(renderer, marks) if isinstance(renderer, Decodes) else None
        return self._texts[policy]

    async def answers(self, prompt: Prompt, *, listening: bool) -> AsyncGenerator[NewTokens | Sampled, None]:
        """Yield the choices in order. If `listening` is true, tokens are also yielded as they are sampled."""

        async def work(send: Send) -> None:
            choices = (self._choice(prompt, k, send, listening=listening) for k in range(len(prompt.seeds)))
            complete = await asyncio.gather(*choices)
            if not listening:
                for each in complete:
                    send(each)

        async with aclosing(relayed(self.thread, work)) as coming:  # type: ignore[type-var]
            async for each in coming:
                if isinstance(each, Sampled):
                    self.metrics.answered(prompt.agent, *each.usage)
                yield each

    async def _choice(self, prompt: Prompt, choice: int, send: Send, *, listening: bool) -> Sampled:
        def on_tokens(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            send(NewTokens(choice, ids, logprobs))

        request = self._request(prompt, prompt.seeds[choice])
        completion = await stream_or_generate(self.setup.engine, request, on_tokens if listening else None)
        if not all(map(math.isfinite, completion.logprobs)):
            why = f"The weights of '{request.policy}' are broken: their log-probs are not finite."
            raise RequestError(500, why, None, "weights")
        complete = Sampled(choice, completion, len(prompt.ids))
        if listening:
            send(complete)
        return complete

    async def alternatives(self, prompt: Prompt, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` most likely tokens at each position of a completion."""
        if not count:
            return ()
        request = self._request(prompt, 0)

        async def find() -> Sequence[Likeliest]:
            engine = engine_of(self.setup.engine, request.policy)
            assert isinstance(engine, KnowsAlternatives), "`read_chat` has checked it"
            return engine.alternatives(request, ids, count)

        return await self.thread.ask(find)

    def _request(self, prompt: Prompt, seed: int) -> Request:
        policy, task = self.setup.team.policy(prompt.agent).name, Task("served", prompt.messages[-1].content)
        return Request(policy, prompt.agent, prompt.messages, prompt.ids, prompt.sampling, seed, task)


async def relayed(
    thread: LoopThread, work: Callable[[Send], Coroutine[Any, Any, None]]
) -> AsyncIterator[Any]:
    """Run `work` in the event loop of the engine and yield the items that it sends. If the iterator is closed, the work is cancelled.

    Raises RequestError if the engine fails.
    """
    here = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    end = object()

    def send(item: Any) -> None:
        with suppress(RuntimeError):  # the server's loop may already be closed
            here.call_soon_threadsafe(queue.put_nowait, item)

    task = asyncio.ensure_future(thread.ask(lambda: work(send)))
    task.add_done_callback(lambda _: send(end))
    try:
        while (item := await queue.get()) is not end:
            yield item
        try:
            task.result()
        except EngineError as error:
            LOG.error("The engine failed: %s", error)
            raise RequestError(
                503, "The sampling engine failed; see the service's log.", None, "engine"
            ) from None
        except EpisodeError as error:  # the response of an endpoint
            raise endpoint_failed(str(error), refused=isinstance(error, RequestRefused)) from None
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def endpoint_failed(message: str, *, refused: bool) -> RequestError:
    """Return the error for a request that the server of an endpoint `refused`, or else failed to answer."""
    return RequestError(400 if refused else 503, without_secrets(message), None, "endpoint")


def too_long(message: str) -> RequestError:
    """Return the error for a prompt that exceeds the model's context."""
    return RequestError(400, message, "messages", "context_length_exceeded")


# -------- Tokens as text while they are sampled: whole characters, without text that a stop string may still remove


class TextStream:
    """The growing text of one completion."""

    def __init__(self, spoken: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Create a stream that decodes tokens with `spoken` and holds back text that may be the beginning of a stop string."""
        self._spoken = spoken
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []
        self._from = self._read = 0
        """The window of tokens that are decoded again, because earlier tokens do not change the text of later tokens."""
        self._text = ""
        self.sent = ""
        """The text that has been returned so far."""

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that can no longer change."""
        self._ids += ids
        before = self._spoken(self._ids[self._from : self._read])
        now = self._spoken(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self.rest(self._text[: len(self._text) - self._held] if self._held else self._text)

    def rest(self, text: str) -> str:
        """Return the part of the complete text that has not been returned yet."""
        new = text[len(self.sent) :]
        self.sent += new
        return new


class AnswerStream:
    """The thoughts and the content of a growing completion."""

    def __init__(self, text: TextStream, form: SpeechForm) -> None:
        self._text, self._form = text, form
        self._thoughts = self._words = ""

    def add(self, ids: Sequence[int]) -> tuple[str, str]:
        """Add tokens, and return the new thoughts and content that can no longer change."""
        self._text.add(ids)
        return self.rest(*self._form.read_partial(self._text.sent))

    def rest(self, thoughts: str, words: str) -> tuple[str, str]:
        """Return the parts of the complete thoughts and content that have not been returned yet."""
        new = thoughts[len(self._thoughts) :], words[len(self._words) :]
        self._thoughts, self._words = thoughts, words
        return new


class MarkedTexts:
    """Decodes text and keeps the special tokens that separate thoughts and tool calls from content."""

    def __init__(self, decodes: Decodes, marks: Collection[str]) -> None:
        self._decodes = decodes
        self._all = marks
        self._marks: dict[int, str] = {}
        """Mapping from a token to the mark that it represents and that `spoken` drops. All other tokens are mapped to an empty string."""

    def marked(self, ids: Sequence[int]) -> bool:
        """Return whether the plain text of the given tokens lacks a mark."""
        return any(map(self._mark, ids))

    def _mark(self, token: int) -> str:
        if token not in self._marks:
            text = self._decodes.decode([token])
            self._marks[token] = text if text in self._all and not self._decodes.spoken([token]) else ""
        return self._marks[token]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, in which special tokens are written out."""
        return self._decodes.decode(ids)

    def spell(self, token: int) -> tuple[str, bytes]:
        """Return the text and the bytes of a token."""
        text = self.decode([token])
        if isinstance(self._decodes, ChatRenderer):
            return text, self._decodes.bytes_of(token)
        return text, text.encode("utf-8", "surrogatepass")

    def spoken(self, ids: Sequence[int]) -> str:
        """Decode tokens to the text of an agent, in which marks are the only special tokens."""
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


# -------- One agent's response to one request


@dataclass(frozen=True, slots=True)
class Chat:
    """A request to an agent that is in progress."""

    agents: Agents
    request: ChatRequest
    prompt: Prompt
    head: Head
    decodes: MarkedTexts | None
    reader: MessageReader

    @property
    def renderer(self) -> Renderer:
        """The renderer of the agent, with the arguments from the caller that the agent's chat template uses."""
        setup, agent = self.agents.setup, self.agents.setup.team[self.prompt.agent]
        renderer = setup.engine.renderer(setup.team.policy(agent.name).name)
        read = (template_variables(renderer.template) if isinstance(renderer, HasTemplate) else None) or ()
        given = {name: each for name, each in self.request.chat_template_kwargs.items() if name in read}
        return agent_renderer(
            replace(agent, chat_template_kwargs={**agent.chat_template_kwargs, **given}), renderer
        )

    async def prompted(self, ids: Callable[[], Sequence[int]] | None = None) -> Chat:
        """Return the chat with the tokens of its prompt, which are taken from `ids` or, by default, from the rendered conversation.

        Raises RequestError (400) if the prompt has too many tokens for the agent's model.
        """
        setup, agent, renderer = self.agents.setup, self.prompt.agent, self.renderer
        known = await self._prompt_ids(ids)
        if not known:
            raise wrong(
                "The prompt has no tokens, but the model needs at least one. Add text to the prompt.",
                "messages",
            )
        room = renderer.context - len(known)
        if room <= 0:
            raise too_long(
                f"The prompt has {len(known):,} tokens, but the context of the agent's model has {renderer.context:,}."
            )
        sampling = self.prompt.sampling
        seed = secrets.randbits(62) if self.request.seed is None else self.request.seed
        seeds = (seed, *(derive_seed(seed, "choice", k) for k in range(1, self.request.n)))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        await check_length(self.request, sampling, setup, agent)
        return replace(self, prompt=replace(self.prompt, ids=known, sampling=sampling, seeds=seeds))

    async def _prompt_ids(self, ids: Callable[[], Sequence[int]] | None = None) -> tuple[int, ...]:
        render = ids or partial(self.renderer.start, self.prompt.messages)
        try:  # rendering a long conversation takes a while
            return tuple(await asyncio.to_thread(render))
        except ContextError as error:
            raise too_long(str(error)) from None

    async def prompt_tokens(self) -> int:
        """Return the number of tokens of the rendered conversation."""
        return len(await self._prompt_ids())

    async def pieces(
        self, answers: AsyncIterator[NewTokens | Sampled]
    ) -> AsyncGenerator[Piece | Finished, None]:
        """Yield the content while it is generated, and each choice when it is complete."""
        stops, form = self.prompt.sampling.stop, self.form
        texts = {
            k: AnswerStream(TextStream(self.decodes.spoken, stops), form)
            for k in range(self.request.n)
            if self.decodes is not None
        }
        sent = [0] * self.request.n
        prompt_is_counted = False
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                k = each.choice
                if isinstance(each, NewTokens):
                    sent[k] += len(each.ids)
                    new = texts[k].add(each.ids) if k in texts else ("", "")
                    yield Piece(k, *new, self._tokens(each.ids, each.logprobs))
                    continue
                completion = each.completion
                parsed = self.parsed(completion)
                # With `length`, OpenAI's client raises an error instead of returning a complete call.
                reason = "tool_calls" if parsed.calls else completion.finish_reason
                whole = parsed.thoughts, parsed.words
                rest = texts[k].rest(*whole) if k in texts else whole
                # `top_logprobs` exist only for responses that are not streamed.
                others = await self.agents.alternatives(
                    self.prompt, completion.ids, self.request.top_logprobs
                )
                rows = self._tokens(completion.ids[sent[k] :], completion.logprobs[sent[k] :], others)
                read, written = each.usage
                usage = 0 if prompt_is_counted else read, written
                prompt_is_counted = True
                about = {"version": completion.version, "weights_hash": completion.weights_hash}
                stop = self._stop_of(completion)
                yield Finished(k, *rest, rows, message_of(parsed), reason, usage, about, stop)

    @property
    def form(self) -> SpeechForm:
        """The rules for parsing the completions of the agent."""
        request = self.request
        opening = "" if self.decodes is None else self.decodes.decode(self.prompt.ids[-8:])
        # A constrained completion has no thoughts.
        opened = tuple(mark for mark, _ in thought_marks(self.reader.form))
        thinking = opening.rstrip().endswith(opened) and self.prompt.sampling.constraint is None
        schemas = [tool.function.model_dump() for tool in request.tools]
        described = self.reader.described
        prompt = "" if described is None or self.decodes is None else self.decodes.decode(self.prompt.ids)
        return SpeechForm(self.reader.form, request.calls_tools, thinking, schemas, described, prompt)

    def parsed(self, completion: Completion) -> ParsedAnswer:
        """Return the thoughts, content and tool calls of a completion.

        The text of the completion may lack the special tokens that separate these parts.
        """
        ids, text = completion.ids, completion.text
        is_described = self.reader.described is not None
        if self.decodes is not None and (is_described or self.decodes.marked(ids)):
            text = self.decodes.decode(ids) if is_described else self.decodes.spoken(ids)
            for stop in self.prompt.sampling.stop:
                text = text.partition(stop)[0]
        answer = self.form.read(text, is_cut=completion.finish_reason == "length")
        if is_described and answer.words == text:  # the text does not have that format
            answer = answer._replace(words=completion.text)
        return answer if self.request.parallel_tool_calls else answer._replace(calls=answer.calls[:1])

    def _stop_of(self, completion: Completion) -> str | None:
        """Return the caller's stop string that ended a completion, or None if there is none or no tokens are known."""
        if self.decodes is None or not self.request.stops or completion.finish_reason != "stop":
            return None
        text = self.decodes.spoken(completion.ids)
        found = [stop for stop in self.request.stops if stop in text]
        return min(found, key=text.find, default=None)

    def _tokens(
        self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Likeliest] = ()
    ) -> list[Json] | None:
        """Return the sampled tokens with their log-probs, or None if the caller has not requested them."""
        if self.decodes is None or not self.request.logprobs:
            return None
        return token_rows(ids, logprobs, self.decodes.spell, alternatives)


_ENDS: Mapping[Form, tuple[str, ...]] = {
    "hermes": ("</tool_call>",),
    "glm": ("</tool_call>",),
    "qwen_coder": ("</tool_call>",),
    "deepseek": ("<｜tool▁call▁end｜>",),
}
"""Mapping from a format to the strings that end its first tool call. All other formats write tool calls as one list, of which
only the first call is used."""


def ends_of_one_call(request: ChatRequest, form: Form) -> tuple[str, ...]:
    """Return the strings that end a completion, if the completion may contain at most one tool call."""
    if request.parallel_tool_calls or not request.calls_tools:
        return ()
    return _ENDS.get(form, ())


def read_chat(agents: Agents, model: str, agent: str, request: ChatRequest) -> Chat:
    """Return a chat without the tokens of its prompt. Raises RequestError (400) for parameters that the agent does not support."""
    if request.logprobs and agents.texts(agent) is None:
        raise wrong(
            f"The engine of '{agent}' returns no tokens, so log-probs are unavailable. Remove `logprobs`.",
            "logprobs",
        )
    if request.top_logprobs and not request.logprobs:
        raise wrong("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    if request.top_logprobs and not (
        agents.thread.begun.is_set()
        and isinstance(
            engine_of(agents.setup.engine, agents.setup.team.policy(agent).name), KnowsAlternatives
        )
    ):
        raise wrong("`top_logprobs` are not supported by this server.", "top_logprobs")
    tools = request.tools if request.calls_tools else ()
    for name in request.without_effect:
        agents.warn_once(
            f"A caller has set `{name}`, which has no effect: agents respond in the way they were trained."
        )
    known, reader = agents.setup.team[agent], agents.reader(agent)
    renderer = agents.setup.engine.renderer(agents.setup.team.policy(agent).name)
    if request.logit_bias and isinstance(renderer, ReadsPrompts):
        try:
            renderer.plain([int(token) for token in request.logit_bias])
        except ContextError as error:
            raise wrong(f"`logit_bias`: {error}", "logit_bias") from None
    messages = tuple(reader.conversation(request.messages, tools, instructions(known)))
    sampling = request.sampling(known.sampling)
    constraint = constraint_of(request, reader, agents.setup, agent)
    if constraint is not None:
        sampling = replace(sampling, constraint=constraint)
    else:
        sampling = replace(sampling, stop=(*sampling.stop, *ends_of_one_call(request, reader.form)))
    prompt = Prompt(agent, messages, (), sampling, ())
    return Chat(agents, request, prompt, Head(model), agents.texts(agent), reader)
