"""A worker whose questions say how to misbehave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kapelle.environments.grading.processes import serve
from kapelle.types import Json

SEEN: list[int] = []


def loop(_question: Json) -> Json:
    while True:
        pass


def ignore_signals(question: Json) -> Json:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return loop(question)


def wait(_question: Json) -> Json:
    signal.pause()
    return None


def sleep(question: Json) -> Json:
    time.sleep(question["seconds"])
    return question["value"]


def memory(_question: Json) -> Json:
    return len(bytearray(700 << 20))


def recursion(question: Json) -> Json:
    return recursion(question)


def exit_at_once(_question: Json) -> Json:
    os._exit(0)


def half_a_line(_question: Json) -> Json:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'{"answer": tr')
        except OSError:
            continue
    os._exit(0)


def count(_question: Json) -> Json:
    SEEN.append(1)
    return len(SEEN)


def write(question: Json) -> Json:
    return Path(question["folder"], "file").write_text("written", encoding="utf-8")


def shout(_question: Json) -> Json:
    os.write(1, b'{"answer": "a lie"}\n')
    return "printed"


WAYS: Mapping[str, Callable[[Json], Json]] = {
    "echo": lambda question: question["value"],
    "print": shout,
    "loop": loop,
    "wait": wait,
    "sleep": sleep,
    "ignore signals": ignore_signals,
    "power": lambda _: len(str(9 ** (9**9) % 7)),
    "exit": exit_at_once,
    "crash": lambda _: signal.raise_signal(signal.SIGSEGV),
    "half a line": half_a_line,
    "memory": memory,
    "recursion": recursion,
    "raise": lambda _: 1 // 0,
    "shell": lambda _: os.system("true"),  # noqa: S605 (refused by the server: that is the test)
    "fork": lambda _: os.fork(),
    "write": write,
    "count": count,
}


if __name__ == "__main__":
    serve(lambda question: WAYS[question["do"]](question))
