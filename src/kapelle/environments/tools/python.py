"""The tool `python`: an interpreter in a sandbox that keeps its variables during an episode."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import backend, require
from kapelle.environments.sandbox.session import Backend, Session, start
from kapelle.environments.tools import python_driver as tool_python_driver
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSettings, one_text
from kapelle.settings.base import FREE, FROM_HERE_ON
from kapelle.types import Json

_SCHEMA = one_text(
    "python",
    "Runs a Python program and returns what it prints and the value of its last line. Variables stay.",
    "program",
)
_BEGIN = "import sys; sys.path.insert(0, ''); from interpreter import serve; serve()"
EPISODE_S = 24 * 3600.0
"""The maximum lifetime of an interpreter in seconds, including the time that agents need for their turns."""


class Python(ToolSettings):
    """Settings of the tool `python`."""

    tool: Literal["python"] = "python"
    descriptors: ClassVar[int] = 7
    """The number of file descriptors that an interpreter needs: three pipes and the descriptors of its sandbox."""
    sandbox: Annotated[str, FROM_HERE_ON] = "bubblewrap"
    """The sandbox in which the interpreter runs, which is `bubblewrap`, `docker`, or `unsafe_subprocess` (no isolation)."""
    call_s: Annotated[float, FREE] = Field(default=10.0, gt=0.0)
    """Maximum wall-clock time in seconds for each program."""
    cpu_s: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Maximum CPU time in seconds for all programs of an interpreter together."""
    memory_mb: Annotated[int, FREE] = Field(default=512, ge=64)
    """Maximum memory of an interpreter in MiB."""

    def check(self) -> None:
        """Raise SandboxError if the sandbox is unavailable on this machine."""
        require(backend(self.sandbox))

    def open(self) -> Interpreter:
        """Return an interpreter, which is started by its first program."""
        limits = Limits(wall_s=EPISODE_S, cpu_s=self.cpu_s, memory_bytes=self.memory_mb * 1024**2)
        return Interpreter(backend(self.sandbox), limits, self.call_s)


class Interpreter(Toolbox):
    """An interpreter in a sandbox. After a failure, the next program starts a new interpreter, which has no variables."""

    def __init__(self, sandbox: Backend, limits: Limits, call_s: float) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._call_s = call_s
        self._session: Session | None = None
        super().__init__(Tool(_SCHEMA, self.run))

    def run(self, arguments: Mapping[str, Json]) -> str:
        """Run `program` and return its output. Raises ToolFault if the program has ended the interpreter or its reply cannot be read."""
        if self._session is None:
            command = [self._sandbox.python, "-I", "-B", "-c", _BEGIN]
            driver = Path(str(tool_python_driver.__file__)).read_bytes()
            self._session = start(self._sandbox, {"interpreter.py": driver}, command, self._limits)
        # The number is random, so that an earlier program cannot have written the reply in advance.
        number = secrets.token_hex(16).encode()
        self._session.send(number + b" " + json.dumps(arguments["program"]).encode() + b"\n")
        line = self._session.receive(self._call_s)
        if line is None:
            ended = self._session.ended
            session, self._session = self._session, None
            limit = session.finish(kill=True).limit
            if limit is not None:
                why = f"The interpreter reached its limit of {limit}."
            elif ended:
                why = "The program ended the interpreter."
            else:
                why = f"The program took longer than {self._call_s:g} s."
            raise ToolFault(f"{why} Its variables are gone; the next program starts afresh.")
        reply_number, _, reply = line.partition(b" ")
        try:
            printed = json.loads(reply) if reply_number == number else None
        except (ValueError, RecursionError):
            printed = None
        if not isinstance(printed, str):
            self.close()
            raise ToolFault(
                "The program wrote on the interpreter's own channel and broke it. The next program starts afresh."
            )
        # The program shares its process with the driver, so the reply may be longer than the driver's limit.
        return printed[: tool_python_driver.MAX_PRINTED].rstrip() or "(nothing was printed)"

    def close(self) -> None:
        """Terminate the interpreter."""
        if self._session is not None:
            self._session.finish(kill=True)
            self._session = None
