"""A process without free descriptors gets one clear error and no further traceback."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys

import pytest

from kapelle.runtime.event_loop import run_async
from kapelle.runtime.interrupts import StopRequested, catch_interrupts, stop_if_requested
from kapelle.runtime.machine import refusal


def no_more(*_args: object, **_more: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def nothing() -> None:
    return None


def test_a_failed_event_loop_leaves_nothing_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with monkeypatch.context() as without:
        without.setattr(socket, "socketpair", no_more)
        with pytest.raises(OSError) as raised:
            run_async(nothing)
    assert raised.value.errno == errno.EMFILE
    assert "cannot open more files" in (refusal(raised.value) or "")
    del raised
    gc.collect()
    assert not seen
    run_async(nothing)


def test_signals_are_handled_without_a_pipe_to_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pipe", no_more)
    with catch_interrupts(lambda _: None) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            stop_if_requested()
    assert stopped.exit_code == 143
