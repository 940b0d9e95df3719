"""Ctrl-C at a moment that a test chooses."""

from __future__ import annotations

import signal
from types import ModuleType
from typing import Any

import pytest

from kapelle.runtime.console import say


def interrupt_at(begins: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C when a module's `say` prints a line that begins so."""

    def interrupting(text: str, *rest: Any) -> None:
        say(text, *rest)
        if text.startswith(begins):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "say", interrupting)
