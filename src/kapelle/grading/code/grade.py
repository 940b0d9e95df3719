"""Grades programs by test programs, without ever letting a candidate near an expected value.

    candidate's sandbox ⇄ referee (this process, trusted) ⇄ tests' sandbox

The candidate gets one input at a time and answers in a typed encoding; the tests get values of built-in types
and hold the expected ones; the referee passes messages, checks each, and counts what the tests say. Exit
codes and printed claims decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kapelle.grading.code import remote, rewriting, test_driver
from kapelle.grading.code import values as code_values
from kapelle.grading.code.candidates import REPLIES, Candidate, CandidateGone, driver_command, source_of
from kapelle.grading.code.values import ValueFault, decode, encode
from kapelle.grading.code.verdict import TEST_STATUSES, CodeGrade, TestOutcome
from kapelle.sandbox.contract import Backend, Limits, Session


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Tests that are programs of their own: asserts, or a `check` function with its call."""

    programs: tuple[str, ...]
    """Each is one test: it passes when it runs to its end."""
    setup: str = ""
    """Runs once before the tests; what it defines is theirs."""
    candidate: tuple[str, ...] = ()
    """Names that are the candidate's, even where Python or the setup define them too: any other name that the tests use and
    nobody defines is the tests' fault, and nothing is graded. Empty: what nobody defines is the candidate's, unless it is
    one of several and looks like an import that was forgotten (`Counter`, `np`)."""


def grade_program(
    solution: str, tests: ProgramTests, sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Run test programs against a solution, in two sandboxes that meet only in this process.

    `limits` hold for each start of the candidate, and but for wall time, which covers the candidate's, for
    the tests. Raises SandboxError when the machine cannot give a sandbox.
    """
    limits = limits or Limits()
    count = len(tests.programs)
    candidate = Candidate(solution, sandbox, limits)
    ready = sandbox.prepare(
        replace(
            limits,
            wall_s=limits.wall_s * (count + 1),
            output_bytes=max(limits.output_bytes, REPLIES),
        )
    )
    session: Session | None = None
    try:
        candidate.start()
        command = driver_command(sandbox, "test_driver", str(count), *tests.candidate)
        session = ready.start(_test_files(tests), command)
        return _carry(candidate, session, count, limits.wall_s * (count + 1))
    finally:
        candidate.close()
        if session is not None:
            session.finish(kill=True)
        ready.discard()


_MODULES = (test_driver, remote, rewriting, code_values)
"""What runs in the tests' sandbox."""


def _test_files(tests: ProgramTests) -> dict[str, bytes]:
    programs = {f"test_{index}.py": text.encode() for index, text in enumerate(tests.programs)}
    return {
        **programs,
        "setup.py": tests.setup.encode(),
        **{
            f"kapelle/grading/code/{module.__name__.rpartition('.')[2]}.py": source_of(module)
            for module in _MODULES
        },
    }


def _carry(candidate: Candidate, tests: Session, count: int, within_s: float) -> CodeGrade:
    """Carry messages until the tests are done, and return their results."""
    outcomes = [TestOutcome("not_run", "an earlier test ended the run")] * count
    while True:
        line = tests.receive(within_s)
        if line is None:
            result = tests.finish(kill=True)
            said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = (
                f"the tests reached their limit of {result.limit}"
                if result.limit
                else "the tests ended early"
            )
            return CodeGrade(tuple(outcomes), explanation=": ".join([why, *said]))
        if line.startswith(b"?"):
            tests.send(_reply(candidate, line[1:]) + b"\n")
            continue
        try:
            message = decode(line)
        except ValueFault as fault:
            return CodeGrade(tuple(outcomes), "ungraded", f"the tests sent {fault}")
        kind, *rest = message
        if kind == "done":
            return CodeGrade(tuple(outcomes))
        if kind == "broken":
            return CodeGrade(tuple(outcomes), "ungraded", rest[0])
        if kind == "result":
            index, status, explanation = rest
            assert status in TEST_STATUSES, "written by our own driver"
            if status == "passed" and candidate.lost:
                # A test that expects an exception of any kind is not passed by a candidate that is gone.
                status, explanation = "error", f"the candidate did not answer: {candidate.lost}"
            outcomes[index] = TestOutcome(status, explanation)
            candidate.renew()


def _reply(candidate: Candidate, question: bytes) -> bytes:
    """Return the text of the candidate's reply as it stands, or behind `!` why there is none: it is read in the tests' sandbox."""
    try:
        return candidate.carry(question)
    except CandidateGone as gone:
        return b"!" + encode(f"{gone}").encode()
