"""Asks a candidate in its sandbox, one call at a time, and believes nothing but well-formed values."""

from __future__ import annotations

import functools
import secrets
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from kapelle.grading.code import candidate_driver
from kapelle.grading.code import values as code_values
from kapelle.grading.code.programs import runnable
from kapelle.grading.code.values import Plain, Refer, Resolve, ValueFault, decode, encode
from kapelle.sandbox.contract import Backend, Limits, Session, start

REPLIES = 64 * 1024**2
"""Bytes that a candidate may answer in all, whatever it may print."""
MOST_STARTS = 3
"""How often one candidate is started: a test that ends it costs the next ones nothing, within bounds."""


class CandidateGone(Exception):
    """The candidate did not answer: it ended, reached a limit, or sent something that is not a reply."""


class Candidate:
    """A solution in a sandbox of its own, started at the first question, and again after it was lost."""

    def __init__(self, solution: str, sandbox: Backend, limits: Limits) -> None:
        self._files = {
            "solution.py": runnable(solution).encode("utf-8", "surrogatepass"),
            "kapelle/grading/code/candidate_driver.py": source_of(candidate_driver),
            "kapelle/grading/code/values.py": source_of(code_values),
        }
        self._sandbox = sandbox
        self._limits = replace(limits, output_bytes=max(limits.output_bytes, REPLIES))
        self._session: Session | None = None
        self._starts = 0
        self._lost = ""

    def start(self) -> None:
        """Start it, so that it is ready when it is asked. Raises SandboxError."""
        self._starts += 1
        self._lost = ""
        command = driver_command(self._sandbox, "candidate_driver")
        self._session = start(self._sandbox, self._files, command, self._limits)

    @property
    def lost(self) -> str:
        """Why it answers no more, until `renew`; empty while it does."""
        return self._lost

    def ask(
        self, *question: Plain, refer: Refer | None = None, resolve: Resolve | None = None
    ) -> tuple[str, Plain]:
        """Return the kind and the content of its reply: `"value"` and what it is, or `"error"` and what was raised.

        Raises CandidateGone, and goes on doing so until `renew`; ValueFault for a question that is too large.
        """
        try:
            reply = decode(self.carry(encode(question, refer).encode()), resolve)
            if type(reply) is tuple and len(reply) == len(_REPLY) and reply[0] in ("value", "error"):
                return reply[0], reply[1]
            self._lost = "it sent something that is not a reply to its question"
        except ValueFault as fault:
            self._lost = f"it sent {fault}"
        raise CandidateGone(self._lost)

    def carry(self, question: bytes) -> bytes:
        """Return the text of its reply to the text of a question, which whoever asks must check. Raises CandidateGone like `ask`."""
        if self._lost:
            raise CandidateGone(self._lost)
        if self._session is None:
            self.start()
        assert self._session is not None, "started above"
        # A reply belongs to its question by a mark that no program can write ahead of it.
        mark = secrets.token_hex(8).encode()
        self._session.send(mark + b" " + question + b"\n")
        line = self._session.receive(self._limits.wall_s)
        if line is not None and line.startswith(mark + b" "):
            return line[len(mark) + 1 :]
        if line is not None:
            self._lost = "it sent something that is not a reply to its question"
        else:
            result = self._session.finish(kill=True)
            self._lost = (
                f"it reached its limit of {result.limit}" if result.limit else "it ended without an answer"
            )
        raise CandidateGone(self._lost)

    def renew(self) -> None:
        """Let the next question start it afresh, if it was lost and has starts left."""
        if self._lost and self._starts < MOST_STARTS:
            self.close()
            self._session, self._lost = None, ""

    def close(self) -> None:
        """End it."""
        if self._session is not None:
            self._session.finish(kill=True)


_REPLY = ("kind", "content", "changes", "kept", "printed")


@functools.cache
def source_of(module: ModuleType) -> bytes:
    """Return the text of a driver, which is copied into sandboxes as it stands."""
    return Path(str(module.__file__)).read_bytes()


def driver_command(sandbox: Backend, driver: str, *arguments: str) -> list[str]:
    """Return the command of a driver: isolated from the environment and the user's packages."""
    begin = f"import sys; sys.path.insert(0, ''); from kapelle.grading.code.{driver} import serve; serve()"
    return [sandbox.python, "-I", "-B", "-c", begin, *arguments]
