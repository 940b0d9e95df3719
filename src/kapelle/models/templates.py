"""Chat templates: which conversations they take, and how they are run.

Templates are programs that come with a model: whatever they raise becomes one error, and their running time is bounded.
A template may loop for too long. A watching thread then ends the rendering with an exception that the
interpreter raises between two steps of the template's loop. A power, which may be a single endless step, is
refused beforehand.

Templates of some families refuse a system message (Gemma, the first Mistral), two messages of the user in a row, or an
agent that speaks first. Others leave such messages out without a word. What a template takes is found out by rendering a few
conversations; what it does not take becomes a part of a user's message, which every template takes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kapelle.errors import KapelleError, ModelError
from kapelle.runtime.clock import SuspendAwareClock
from kapelle.runtime.machine import refusal
from kapelle.types import Json, Message, conversation

LIMIT_S = 10.0
"""Seconds that one rendering may take; real ones take a thousandth of one."""
_LOOKS = 10
_FIX = "Fix its chat_template.jinja, or use another model."


def check_template(name: str, found: str | dict[str, str] | None) -> None:
    """Raise ModelError if the tokeniser of this name has no chat template, or one that is invalid or raises to a power."""
    from jinja2 import Environment, TemplateError

    if not found:
        raise ModelError(
            f"The tokeniser of '{name}' has no chat template, so agents cannot converse. "
            "Use an instruction-tuned model, or put a `chat_template.jinja` into its folder."
        )
    for template in found.values() if isinstance(found, dict) else [found]:
        try:
            read = Environment().lex(template)  # noqa: S701 (nothing is rendered here)
            powers = [line for line, kind, what in read if (kind, what) == _POWER]
        except TemplateError as error:
            raise ModelError(f"The chat template of '{name}' is invalid: {error}. {_FIX}") from None
        if powers:
            raise ModelError(
                f"The chat template of '{name}' raises to a power in line {powers[0]}, which may never end and belongs "
                f"in no conversation. {_FIX}"
            )


_POWER = ("operator", "**")


@contextmanager
def rendering(name: str) -> Iterator[None]:
    """Turn what a template raises inside, or that it takes longer than `LIMIT_S`, into a ModelError."""
    fault: Exception | None = None
    try:
        _WATCH.begin()
        try:
            yield
        except _TooLong:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to other people's programs and libraries
            fault = error
        _WATCH.end()
    except _TooLong:
        raise ModelError(
            f"The chat template of '{name}' did not finish within {LIMIT_S:g} s. {_FIX}"
        ) from None
    finally:
        _WATCH.forget()
    if isinstance(fault, KapelleError):
        raise fault
    if fault is not None:
        why = refusal(fault) or f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}."
        raise ModelError(f"The chat template of '{name}' failed: {why} {_FIX}") from fault


class _TooLong(Exception):
    """Raised by the watching thread in a thread that renders."""


class _Watch:
    """When each thread began to render, and a thread that ends renderings that take too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[int, SuspendAwareClock] = {}
        self._ended: set[int] = set()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Record that this thread begins to render."""
        me = threading.get_ident()
        with self._lock:
            self._ended.discard(me)
            self._clocks[me] = SuspendAwareClock(LIMIT_S / _LOOKS)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="kapelle-templates", daemon=True)
                with suppress(RuntimeError):  # no thread is available: then nothing is watched
                    self._thread.start()

    def end(self) -> None:
        """Record that this thread is done; an exception already sent to it is raised here at the latest."""
        me = threading.get_ident()
        with self._lock:
            self._clocks.pop(me, None)
            ended = me in self._ended
        while ended:
            time.sleep(0.001)

    def forget(self) -> None:
        """Stop watching this thread."""
        with self._lock:
            self._clocks.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(LIMIT_S / _LOOKS)
            with self._lock:
                for thread, clock in self._clocks.items():
                    if clock.now() > LIMIT_S and thread not in self._ended:
                        self._ended.add(thread)
                        raised = ctypes.py_object(_TooLong)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_WATCH = _Watch()


Render = Callable[[list[dict[str, Json]], bool], str]
"""Writes a conversation as text; with True it opens the agent's next message. Raises ModelError."""

WORDS = ("kapelleone", "kapelletwo", "kapellethree")
"""Texts of the conversations that are tried; a template can neither strip nor escape them."""


@dataclass(slots=True)
class TemplateForm:
    """The conversations that one template takes; each kind is tried when it is first needed."""

    _render: Render
    _taken: dict[tuple[str, ...], bool] = field(default_factory=dict)
    _in_parts: bool | None = None
    _header: str | None = None

    def text(self, messages: Sequence[Message], *, speak: bool) -> str:
        """Return a conversation as text; with `speak` it ends where the agent's next message begins. Raises ModelError when the template fails."""
        written = self._written(self._fitted(messages, speak=speak), speak=speak)
        if not self._takes("user"):
            raise ModelError(
                "The chat template leaves out what the user says: no agent would read its task. Fix its chat_template.jinja, "
                "or use another model."
            )
        return written + self.header if speak else written

    @property
    def header(self) -> str:
        """What opens an agent's message where the template does not do so when it is asked to; usually empty."""
        if self._header is None:
            header, asked = "", [Message("user", WORDS[0])]
            silent = self._written(asked, speak=False)
            if self._written(asked, speak=True) == silent and self._takes("user", "assistant"):
                # It is what stands between the user's message and an answer.
                answered = self._written([*asked, Message("assistant", WORDS[1])], speak=False)
                before, _, _ = answered.partition(WORDS[1])
                between = before.removeprefix(silent)
                # A space alone belongs to the first word, as the agent will write it.
                header = between if before.startswith(silent) and between.strip() else ""
            self._header = header
        return self._header

    @property
    def limits(self) -> tuple[str, ...]:
        """What the template does not do, and what is done about it; empty for most templates."""
        found = {
            "takes no system message (agents' `system` opens their first user message instead)": (
                not self._takes("system", "user")
            ),
            "wants user and assistant in turn (messages in a row are joined)": not self._takes(
                "user", "user"
            ),
            "takes no answer of the agent (an agent that speaks twice ends in an error)": not self._takes(
                "user", "assistant"
            ),
            f"ignores `add_generation_prompt` (kapelle adds {self.header!r}, as it stands before answers)": bool(
                self.header
            ),
        }
        return tuple(limit for limit, holds in found.items() if holds)

    def _fitted(self, messages: Sequence[Message], *, speak: bool) -> list[Message]:
        """Return messages that say the same, in roles and an order that the template takes."""
        fitted: list[Message] = []
        joins = False
        for message in messages:
            foreign = message.role not in ("user", "assistant") and not self._takes(
                *((message.role, "user") if not fitted else ("user", "assistant", message.role))
            )
            role = "user" if foreign else message.role
            before = fitted[-1].role if fitted else ""
            if role == before == "user" and (foreign or joins or not self._takes("user", "user")):
                fitted[-1] = Message("user", f"{fitted[-1].content}\n\n{message.content}")
                joins = foreign
                continue
            if role == "assistant" and before != "user":
                # An agent's second message in a row is tried behind what the user said first.
                roles = ("user", "assistant") if before == "assistant" else (before,) if before else ()
                if not self._takes(*roles, "assistant"):
                    fitted.append(Message("user", ""))
            fitted.append(Message(role, message.content))
            joins = foreign
        if speak and messages and fitted[-1].role == "assistant" and not self._takes("user", "assistant", ""):
            fitted.append(Message("user", ""))
        return fitted

    def _takes(self, *roles: str) -> bool:
        """Return whether the template writes every message of such a conversation; a last empty role opens the agent's next message."""
        if roles not in self._taken:
            speak = not roles[-1]
            messages = [Message(role, word) for role, word in zip(roles, WORDS, strict=False) if role]
            try:
                text = self._written(messages, speak=speak)
                self._taken[roles] = all(message.content in text for message in messages)
            except ModelError as error:
                if error.__cause__ is None:  # it took too long, as it would for any conversation
                    raise
                self._taken[roles] = False
        return self._taken[roles]

    def _written(self, messages: Sequence[Message], *, speak: bool) -> str:
        if self._in_parts is None:
            self._in_parts = False
            if not self._takes("user"):
                # Templates of models that see images take texts as lists of parts.
                self._in_parts = True
                del self._taken["user",]
                self._in_parts = self._takes("user")
        turns: list[dict[str, Json]] = [*conversation(messages)]
        if self._in_parts:
            turns = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in turns]
        return self._render(turns, speak)
