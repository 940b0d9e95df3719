"""Asks a candidate in its sandbox, one call at a time, and believes nothing but well-formed values."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from kapelle.grading.code import candidate_driver, collected
from kapelle.grading.code import values as code_values
from kapelle.grading.code.values import Callback, Plain, ValueFault, decode, encode
from kapelle.sandbox.contract import Backend, Limits, Session, start

REPLIES = 32 * 1024**2
"""Bytes that a candidate may answer in all, whatever it may print."""
MOST_STARTS = 3
"""How often one candidate is started: a test that ends it costs the next ones nothing, within bounds."""


class CandidateGone(Exception):
    """The candidate did not answer: it ended, reached a limit, or sent something that is not a reply."""


class Candidate:
    """A solution in a sandbox of its own, started at the first question, and again after it was lost."""

    def __init__(self, solution: str, sandbox: Backend, limits: Limits) -> None:
        self._files = {
            "solution.py": solution.encode("utf-8", "surrogatepass"),
            "kapelle/grading/code/candidate_driver.py": source_of(candidate_driver),
            "kapelle/grading/code/values.py": source_of(code_values),
            "kapelle/grading/code/collected.py": source_of(collected),
        }
        self._sandbox = sandbox
        self._limits = replace(limits, output_bytes=max(limits.output_bytes, REPLIES))
        self._session: Session | None = None
        self._starts = 0
        self._asked = 0
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

    def ask(self, *question: Plain) -> tuple[Plain, ...]:
        """Return its reply: `("value", value, changed)`, `("error", type names, text, attributes)` or a callback.

        A callback, `("callback", function, args, kwargs)`, waits for the next question to be its result.

        Raises CandidateGone, and goes on doing so until `renew`; ValueFault for a question that is too large.
        """
        if self._lost:
            raise CandidateGone(self._lost)
        if self._session is None:
            self.start()
        assert self._session is not None, "started above"
        self._asked += 1
        message = encode((self._asked, *question)).encode()
        try:
            self._session.send(message + b"\n")
            line = self._session.receive(self._limits.wall_s)
            if line is not None:
                return _checked_reply(decode(line), self._asked)
            result = self._session.finish(kill=True)
            self._lost = (
                f"it reached its limit of {result.limit}" if result.limit else "it ended without an answer"
            )
        except ValueFault as fault:
            self._lost = f"it sent {fault}"
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


def _checked_reply(reply: Plain, asked: int) -> tuple[Plain, ...]:
    if type(reply) is not tuple or len(reply) < 4 or type(reply[0]) is not int or reply[0] != asked:
        raise ValueFault("something that is not a reply to its question")
    kind, *rest = reply[1:]
    well_formed = (
        (kind == "value" and _are(rest, object, dict))
        or (
            kind == "error"
            and _are(rest, tuple, str, dict)
            and all(type(name) is str for name in (*rest[0], *rest[2]))
        )
        or (kind == "callback" and _are(rest, Callback, list, dict) and all(type(k) is str for k in rest[2]))
    )
    if not well_formed:
        raise ValueFault("something that is not a reply to its question")
    return (kind, *rest)


def _are(parts: list[Plain], *kinds: type) -> bool:
    return len(parts) == len(kinds) and all(
        kind is object or type(part) is kind for part, kind in zip(parts, kinds, strict=True)
    )


@functools.cache
def source_of(module: ModuleType) -> bytes:
    """Return the text of a driver, which is copied into sandboxes as it stands."""
    return Path(str(module.__file__)).read_bytes()


def driver_command(sandbox: Backend, driver: str, *arguments: str) -> list[str]:
    """Return the command of a driver: isolated from the environment and the user's packages."""
    begin = f"import sys; sys.path.insert(0, ''); from kapelle.grading.code.{driver} import serve; serve()"
    return [sandbox.python, "-I", "-B", "-c", begin, *arguments]
