"""Programs that several processes run together, joined by gloo on this machine, as a launcher would start them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

SECONDS = 300
"""For which an answer is waited for."""

Program = Callable[..., Any]


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what a launcher tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_ranks(size: int, program: Program, *given: Any, start: str = "forkserver") -> list[Any]:
    """Run `program` in every rank and return what each returned, or the text of what it raised, as a `Raised`.

    Ranks on GPUs `start` by "spawn": whatever has asked for CUDA devices leaves forks that cannot use them.
    """
    context: Any = multiprocessing.get_context(start)
    if isinstance(context, ForkServerContext):
        context.set_forkserver_preload(["tests.support.preloaded"])
    port = free_port()
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, port, theirs, program, given), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    answers = [_answer(pipe) for _, pipe in started]
    for process, _ in started:
        process.join(SECONDS)
        process.kill()
    return answers


class Raised(str):
    """What a rank raised: `Type: message`."""

    __slots__ = ()


def _answer(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(SECONDS) else Raised("it never answered")  # noqa: S301 - from the process that was started here
    except EOFError:
        return Raised("it died")


def _serve(rank: int, size: int, port: int, pipe: Connection, program: Program, given: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment(rank, size, port))
    try:
        answer = program(*given)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        traceback.print_exc()
        answer = Raised(f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(answer))  # whole: the other forms hand over descriptors of this process
    from kapelle.runtime.rank_group import leave_ranks

    leave_ranks(str(answer) if isinstance(answer, Raised) else None)
