"""Start, monitor and stop the processes of external programs from the event loop of the episodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO, Protocol, Self

from kapelle.environment import Outcome
from kapelle.environments.programs import forking
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.process_tree import kill_group
from kapelle.types import Json

SHOWN = 500
"""Maximum number of characters of a failed program's output that a message contains."""
LAST_S = 1.0
"""Maximum time in seconds for reading the remaining output of a program that has exited."""
TIDY_S = 2.0
"""Maximum time in seconds for a program to exit after its episode."""
KEPT = 64 << 10
"""Maximum number of bytes of a program's output that are kept."""
IMPORT_S = 600.0
"""Maximum time in seconds for the imports of `environment.entry`."""


class ProgramEnded(EpisodeError):
    """Raised if the program of an episode exited without posting a reward."""


class StartedProgram(Protocol):
    """A running program of one episode."""

    @property
    def timed(self) -> bool:
        """Whether the program has its own time limit, which replaces `environment.timeout`."""
        ...

    async def ended(self) -> Outcome | EpisodeError:
        """Wait until the program ends and return the outcome of the episode, or an error if there is no outcome."""
        ...

    async def end(self) -> None:
        """Stop the program and all its processes."""
        ...


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """A protocol that reports when a process has exited; `Process.wait` also waits for children that share the output of the process."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(limit=1 << 16, loop=loop)
        self.exited: asyncio.Future[int | None] = loop.create_future()
        self._of: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._of = transport
        super().connection_made(transport)

    def process_exited(self) -> None:
        assert self._of is not None
        if not self.exited.done():
            self.exited.set_result(self._of.get_returncode())
        super().process_exited()


def _file_with(content: Json) -> BinaryIO:
    """Return an open unnamed file with the content as JSON.

    A file is used because, unlike a pipe or an environment variable, it can hold content of any size.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(json.dumps(content, default=str).encode())
    file.seek(0)
    return file


class Program:
    """A process with its own process group, which is stopped at the end of the episode."""

    timed = False

    def __init__(
        self,
        number: int,
        exited: asyncio.Future[int | None],
        output: asyncio.StreamReader,
        release: Callable[[], None],
    ) -> None:
        """Set the id of the process and its group, the future of its exit code, its output, and a function that frees its descriptors."""
        self._number, self._exited, self._stream, self._release = number, exited, output, release
        self._output = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], task: Mapping[str, Json]
    ) -> Program:
        """Start a command with additional environment variables and the task as standard input; raise EpisodeError if this fails."""
        try:
            with _file_with(task) as file:
                transport, protocol = await asyncio.get_running_loop().subprocess_exec(
                    _Exit,
                    *command,
                    env={**os.environ, **variables},
                    stdin=file,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EpisodeError(
                f"`environment.command` cannot be started: {error.strerror} ({command[0]})."
            ) from None
        assert protocol.stdout is not None
        return cls(transport.get_pid(), protocol.exited, protocol.stdout, transport.close)

    async def ended(self) -> EpisodeError:
        """Wait until the program exits and return an error that explains why there is no reward."""
        code = await asyncio.shield(self._exited)
        # Child processes may continue after exit code 0, for example if the program is a wrapper. After a failure, they are ignored.
        await asyncio.wait((self._reading,), timeout=None if code == 0 else LAST_S)
        lines = [line for line in self._output.decode("utf-8", "replace").splitlines() if line.strip(" ^~")]
        output = " ".join(" ".join(lines).split())
        # The exception of a traceback is its last line. It comes first in the message, because lists of runs shorten messages.
        raised = any(line.startswith("Traceback (") for line in lines) and not lines[-1].startswith(" ")
        output = f"{'… ' if len(output) > SHOWN else ''}{output[-SHOWN:]}" or "(nothing)"
        if code == forking.REJECTED:
            return EpisodeError(f"The program's function returned no valid reward: {output}")
        how = "lost the process from which it was forked" if code is None else f"ended with code {code}"
        what = f"{how} and posted no reward{f': {lines[-1].strip()}' if raised else ''}"
        return ProgramEnded(f"The program {what.rstrip('.')}. Its output: {output}")

    async def end(self) -> None:
        """Stop the program and all its processes.

        SIGTERM is sent before SIGKILL, so that the client of a container can stop its container.
        """
        self._signal(signal.SIGTERM)
        await asyncio.wait((self._exited,), timeout=TIDY_S)
        self._signal(signal.SIGKILL)
        await asyncio.wait((self._exited,))
        await asyncio.wait((self._reading,), timeout=LAST_S)
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._release()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._number, number)

    async def _read(self) -> None:
        while piece := await self._stream.read(1 << 16):
            self._output = (self._output + piece)[-KEPT:]


class ForkServer:
    """A process that has imported a program and forks for each episode.

    The process exits when the current process exits, even after `kill -9`.
    """

    def __init__(self, python: str, entry: str, variables: Mapping[str, str]) -> None:
        """Set the interpreter, the function of the program (`environment.entry`), and the environment variables for the imports."""
        self._command, self._entry = [python, forking.__file__], entry
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        """Start the process; raise ConfigError if the program cannot be imported."""
        self._started()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process and its copies."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            try:
                self._process.wait(TIDY_S)
            except subprocess.TimeoutExpired:
                kill_group(self._process.pid)
                self._process.wait()

    def _started(self) -> socket.socket:
        """Return the socket of the running process; start a process if there is none or if the last process has exited."""
        with self._lock:
            if self._socket is not None and self._process is not None and self._process.poll() is None:
                return self._socket
            if self._socket is not None:
                self._socket.close()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = subprocess.Popen(  # noqa: S603 - the user's interpreter, our own file
                        [*self._command, str(theirs.fileno()), self._entry],
                        pass_fds=(theirs.fileno(),),
                        env={**os.environ, **self._variables},
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # keep the output of imports out of this command's output
                        process_group=0,  # Ctrl-C in the terminal reaches only kapelle, which ends this process
                    )
                except OSError as error:
                    raise ConfigError(
                        f"`environment.python` cannot be started: {error.strerror} ({self._command[0]})."
                    ) from None
            ours.settimeout(IMPORT_S)
            try:
                with ours.makefile("rb") as lines:
                    line = lines.readline()
                fault = json.loads(line) if line else "the process ended; see its output above"
            except TimeoutError:
                fault = f"the import takes more than {IMPORT_S:g} s"
            if fault is not None:
                ours.close()
                kill_group(self._process.pid)
                self._process.wait()
                raise ConfigError(f"`environment.entry` ({self._entry}) cannot be imported: {fault}.")
            ours.settimeout(None)
            self._socket = ours
            return ours

    async def start(self, variables: Mapping[str, str], task: Mapping[str, Json]) -> Program:
        """Fork for one episode, with additional environment variables and the task; raise EpisodeError if this fails."""
        try:
            requests = await asyncio.to_thread(self._started)
        except ConfigError as error:  # an earlier import succeeded, so the configuration is not at fault
            raise EpisodeError(str(error)) from None
        ours, theirs = socket.socketpair()
        end, output = os.pipe()
        stream = asyncio.StreamReader()
        with ExitStack() as closing:
            # The copy ends when this side of its socket is closed.
            reader, writer = await asyncio.open_connection(sock=ours)
            closing.callback(writer.close)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(end, "rb")
            )
            closing.callback(transport.close)
            try:
                with theirs, _file_with({"environment": {**os.environ, **variables}, "task": task}) as job:
                    socket.send_fds(requests, [b"f"], [theirs.fileno(), output, job.fileno()])
            except OSError:
                number = None
            else:
                number = await _noted(reader)
            finally:
                os.close(output)
            if number is None:
                raise EpisodeError(
                    "The process that runs `environment.entry` has ended, or this machine has too little memory to fork it."
                )
            return Program(number, asyncio.ensure_future(_noted(reader)), stream, closing.pop_all().close)


async def _noted(reader: asyncio.StreamReader) -> int | None:
    """Return the next number that arrives on the socket of a copy, or None if the socket is closed."""
    try:
        return int(forking.NOTE.unpack(await reader.readexactly(forking.NOTE.size))[1])
    except (asyncio.IncompleteReadError, OSError):
        return None
