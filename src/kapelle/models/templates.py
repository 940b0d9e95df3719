"""Chat templates are programs that come with a model: whatever they raise becomes one error, and their running time is bounded.

A template may loop for too long. A watching thread then ends the rendering with an exception that the
interpreter raises between two steps of the template's loop. A power, which may be a single endless step, is
refused beforehand.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from kapelle.errors import KapelleError, ModelError
from kapelle.runtime.awake import AwakeClock
from kapelle.runtime.machine import refusal

LIMIT_S = 10.0
"""Seconds that one rendering may take; real ones take a thousandth of one."""
_LOOKS = 10
_FIX = "Fix its chat_template.jinja, or use another model."


class Templated(Protocol):
    """A tokeniser with the name of its model and its chat template."""

    name_or_path: Any
    chat_template: Any


def check_template(tokenizer: Templated) -> None:
    """Raise ModelError for a tokeniser without a chat template, or whose template is invalid or raises to a power."""
    from jinja2 import Environment, TemplateError

    name, found = tokenizer.name_or_path, tokenizer.chat_template
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
        self._clocks: dict[int, AwakeClock] = {}
        self._ended: set[int] = set()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Record that this thread begins to render."""
        me = threading.get_ident()
        with self._lock:
            self._ended.discard(me)
            self._clocks[me] = AwakeClock(LIMIT_S / _LOOKS)
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
