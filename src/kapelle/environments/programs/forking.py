"""Run episodes of a program in forked copies of one process, which has already imported the packages of the program.

    python forking.py DESCRIPTOR ENTRY      ENTRY is `path/file.py:function` or `module:function`

`processes.ForkServer` starts this file in the program's interpreter, where kapelle may not be installed, so the file needs only
the standard library. The process forks for each byte that arrives, together with three descriptors, on the socket DESCRIPTOR.
Each copy has a separate process session, environment variables and output. A copy imports the program's own modules again, so
that episodes never share a client object; installed packages stay imported. A copy reports the installed modules that it
imported after the fork, so that the original process also imports them before the next fork.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import importlib
import importlib.util
import inspect
import json
import numbers
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NOTE = struct.Struct("=ci")
"""Format of the messages on the socket of a copy. The first message is `p` and the process id of the copy; the last message is
`c` and its exit code."""
REJECTED = 65
"""The exit code of a copy whose function returned a reward that is not valid (EX_DATAERR in sysexits.h)."""


class Rejected(Exception):
    """Raised if the return value of the program's function is not a valid reward."""


def main(descriptor: int, entry: str) -> None:
    """Import the program, report the result on the socket, and fork on request until the socket is closed."""
    requests = socket.socket(fileno=descriptor)
    module, _, name = entry.rpartition(":")
    here = Path.cwd()
    # Replace the folder of this file: scripts look for modules in their own folder, `python -m` looks in the current folder.
    sys.path[0] = str(here)
    if module.endswith(".py"):
        entry = f"{Path(module).resolve()}:{name}"
        sys.path[0] = str(Path(module).resolve().parent)
    sys.argv[:] = [module]
    before = set(sys.modules)
    try:
        find(entry)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        traceback.print_exc()
        requests.sendall(json.dumps(f"{type(error).__name__}: {error}").encode() + b"\n")
        return
    for name, found in sys.modules.copy().items():
        if name not in before and not installed(found):
            del sys.modules[name]
    os.chdir(here)
    gc.collect()
    gc.freeze()  # so that copies share the memory of these objects for longer
    requests.sendall(b"null\n")
    serve(requests, entry)


def find(entry: str) -> Callable[..., Any]:
    """Import the module of the program and return the function that runs an episode."""
    module, _, name = entry.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found  # dataclasses and pydantic look up annotations there
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(module)
    function: Callable[..., Any] = getattr(found, name)
    return function


def installed(module: Any) -> bool:
    """Return whether a module belongs to Python or to an installed package, rather than to the program."""
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if place is None:
        return True
    parents = Path(place).parents
    standard = {Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib"))}
    return any(each.name in ("site-packages", "dist-packages") or each in standard for each in parents)


def serve(requests: socket.socket, entry: str) -> None:
    """Fork for each request; when the socket is closed, kill all copies."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, tuple[socket.socket, int]] = {}
    known: set[str] = set()
    killed: set[int] = set()
    while True:
        owners = {control: copy for copy, (control, _) in running.items() if copy not in killed}
        waiting: list[socket.socket | int] = [requests, wake, *owners]
        ready, _, _ = select.select(waiting, [], [])
        for control in owners.keys() & set(ready):  # kapelle has closed the socket
            kill(owners[control])
            killed.add(owners[control])
        if wake in ready:
            os.read(wake, 4096)
            collect(running, known)
            killed &= running.keys()
        if requests not in ready:
            continue
        byte, descriptors, _, _ = socket.recv_fds(requests, 1, 3, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        if not byte:
            break
        control, (output, job) = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            copy = os.fork()
        except OSError:
            copy = -1  # the closed socket reports the failure
        if copy == 0:
            for each in (requests, *(control for control, _ in running.values())):
                each.close()
            os.close(wake)
            os.close(waker)
            run_episode(entry, control, output, job)
        os.close(output)
        if copy > 0:
            running[copy] = control, job
        else:
            control.close()
            os.close(job)
    for copy in running:
        kill(copy)


def kill(copy: int) -> None:
    """Kill a copy and the processes that it has started."""
    for end in (os.killpg, os.kill):  # before the copy calls `setsid`, it has no separate process group
        with suppress(OSError):
            end(copy, signal.SIGKILL)


def collect(running: dict[int, tuple[socket.socket, int]], known: set[str]) -> None:
    """Report the exit codes of copies that have exited, and import the installed modules that these copies imported after the fork.

    `known` is the set of modules whose import has already been tried.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] not in running:  # this process was started by an import
                continue
            control, job = running.pop(ended[0])
            with suppress(OSError):
                control.sendall(NOTE.pack(b"c", os.waitstatus_to_exitcode(ended[1])))
            control.close()
            late: list[str] = []
            with (
                os.fdopen(job) as file,
                suppress(ValueError),
            ):  # the file is empty, or incomplete if the copy was killed
                file.seek(0)
                late = json.load(file).get("late", [])
            for name in sorted(set(late) - known):
                known.add(name)
                with suppress(Exception):
                    importlib.import_module(name)
                gc.freeze()


def run_episode(entry: str, control: socket.socket, output: int, job: int) -> None:
    """Run one episode in this copy, then exit the copy."""
    code = 1
    try:
        os.setsid()
        control.sendall(NOTE.pack(b"p", os.getpid()))
        control.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        with os.fdopen(os.dup(job)) as file:
            given = json.load(file)
        os.ftruncate(job, 0)
        os.environ.clear()
        os.environ.update(given["environment"])
        if "numpy" in sys.modules:
            # Otherwise, every copy would draw the same numbers. Python's `random` gets a new seed after a fork.
            sys.modules["numpy"].random.seed()
        before = set(sys.modules)
        result = find(entry)(given["task"])
        result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
        late = [name for name, found in sys.modules.copy().items() if name not in before and installed(found)]
        if late:
            os.pwrite(job, json.dumps({"late": late}).encode(), 0)
        post(result)  # this copy is killed afterwards
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Rejected as error:
        sys.stderr.write(f"{error}\n")
        code = REJECTED
    except BaseException:  # noqa: BLE001 - user code may raise anything
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


async def awaited(result: Any) -> Any:
    """Return the result of an awaitable."""
    return await result


def post(result: Any) -> None:
    """Post the return value of the program's function to the policy server.

    The value is a reward, an answer, or a mapping with more fields; None means that the function has posted its own reward.
    """
    if result is None:
        sys.stderr.write(
            "The program's function returned None.\n"
        )  # shown only if it has posted no reward either
        return
    if isinstance(result, numbers.Real):
        result = {"reward": float(result)}
    elif isinstance(result, str):
        result = {"answer": result}
    elif not isinstance(result, Mapping):
        raise Rejected(
            f"The program's function returned {type(result).__name__}. Return a reward (a number), an answer (a string), or a "
            "mapping such as {'reward': 1.0, 'info': {}}."
        )
    url = urlsplit(os.environ["OPENAI_BASE_URL"] + "/reward")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc)
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", url.path, json.dumps(dict(result), default=float).encode(), headers)
    answer = connection.getresponse()
    body = answer.read().decode("utf-8", "replace")
    if answer.status != 200:
        with suppress(ValueError, TypeError, KeyError):  # a proxy may have answered
            body = json.loads(body)["error"]["message"]
        raise Rejected(f"The reward was rejected: {body}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
