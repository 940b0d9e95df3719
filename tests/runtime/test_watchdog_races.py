"""What the watchdog decides on one thread holds for another only while that one is still where it was seen."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from kapelle.runtime import deadlines
from kapelle.runtime.deadlines import WatchedThread, call, watched_thread


def test_a_call_that_has_ended_since_the_look_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(deadlines, "raise_in", lambda _thread, error: raised.append(error))
    monkeypatch.setattr(deadlines, "_watchdog", threading.Event())  # looked at by hand

    def aside() -> None:
        watched = watched_thread()

        def work() -> None:
            watched.look(0.0)  # sees it for the first time
            limit = watched.running
            assert limit is not None
            monkeypatch.setattr(type(limit), "reason", lambda _: None)
            watched.serial += 1  # another call has come in between
            watched._interrupt(limit, None)

        call("a call", "environment", 0.0, work)

    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    assert raised == []


def test_a_thread_that_has_the_number_of_another_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[object] = set()

    class Lanes(dict[object, WatchedThread | None]):
        """A watchdog of another test may take dead threads out at any moment."""

        def __setitem__(self, key: object, watched: WatchedThread | None) -> None:
            seen.add(key)
            super().__setitem__(key, watched)

    monkeypatch.setattr(deadlines, "_watched_threads", Lanes())
    monkeypatch.setattr(deadlines, "_watchdog", threading.Event())
    monkeypatch.setattr(threading, "get_ident", lambda: 7)
    for _ in range(2):
        thread = threading.Thread(target=watched_thread)
        thread.start()
        thread.join()
    assert len(seen) == 2


def test_a_look_does_not_keep_the_call_that_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_watchdog", threading.Event())
    seen: list[weakref.ref[object]] = []

    def aside() -> None:
        watched = watched_thread()

        def work() -> None:
            watched.look(0.0)
            assert watched.running is not None
            seen.append(weakref.ref(watched.running))

        call("a call", "environment", 1.0, work)
        gc.collect()
        held.append(seen[0]())  # while the thread and what the watchdog knows of it still live

    held: list[object] = []
    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    assert held == [None]
