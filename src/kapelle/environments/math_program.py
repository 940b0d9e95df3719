"""An answer that a program works out: the agent writes Python, the sandbox runs it, its last line of output counts."""

from __future__ import annotations

import functools
from typing import NamedTuple

from kapelle.grading.code.programs import program_of
from kapelle.sandbox.contract import Limits, run
from kapelle.sandbox.pool import shared_pool

LIMITS = Limits(wall_s=5.0, cpu_s=3.0, memory_bytes=256 * 1024**2)
PARALLEL = 2
"""Programs that run at once in one process."""


class Printed(NamedTuple):
    """What a program came to."""

    answer: str | None
    """Its last line that is not empty; None when there is none, or the program did not end well."""
    problem: str
    """Why there is none, else empty."""


async def printed_by(text: str, backend: str) -> Printed:
    """Run the program of a text in the sandbox and return its last line; SandboxError when there is no sandbox."""
    program = program_of(text)
    if program is None:
        return Printed(None, "the text holds no program")
    pool = shared_pool(backend, LIMITS, PARALLEL)
    files = {"answer.py": program.encode("utf-8", "surrogatepass")}
    command = [pool.python, "-I", "-B", "answer.py"]
    result = await pool.call(functools.partial(run, pool, files, command, b"", LIMITS))
    if result.limit is not None:
        return Printed(None, f"the program reached its limit of {result.limit}")
    if result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Printed(None, " ".join(["the program failed:", *said])[:500])
    lines = [line.strip() for line in result.stdout.decode(errors="replace").splitlines() if line.strip()]
    return Printed(lines[-1], "") if lines else Printed(None, "the program printed nothing")
