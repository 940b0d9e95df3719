"""Grades programs by test programs, without ever letting a candidate near an expected value.

    candidate's sandbox ⇄ referee (this process, trusted) ⇄ tests' sandbox

The candidate gets one input at a time and answers in a typed encoding; the tests get values of built-in types
and hold the expected ones; the referee passes messages, checks each, and counts what the tests say. Exit
codes and printed claims decide nothing.
"""

from __future__ import annotations

import functools
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kapelle.grading.code import candidate_driver, remote, rewriting, rewritten_calls, test_driver
from kapelle.grading.code import values as code_values
from kapelle.grading.code.programs import runnable
from kapelle.grading.code.values import Plain, Refer, Resolve, ValueFault, decode, encode, plain
from kapelle.sandbox.contract import Limits, Result
from kapelle.sandbox.session import Backend, Session, run, start

# -------- The verdict of a grader on a program: how each test went, and what that is worth

TestStatus = Literal["passed", "failed", "error", "not_run"]
TEST_STATUSES: frozenset[str] = frozenset({"passed", "failed", "error", "not_run"})


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """How one test went."""

    __test__ = False

    status: TestStatus
    """`failed`: it ran and did not hold. `error`: it could not be carried to its end."""
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class CodeGrade:
    """The verdict on one program."""

    tests: tuple[TestOutcome, ...]
    status: Literal["graded", "ungraded"] = "graded"
    """`ungraded`: the tests themselves could not be run, which says nothing about the candidate and must
    never be used as a reward."""
    explanation: str = ""

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(test.status == "passed" for test in self.tests)

    @property
    def score(self) -> float:
        """Share of the tests that passed, for partial credit; 0 where nothing was graded."""
        return self.passed / len(self.tests) if self.tests and self.status == "graded" else 0.0

    @property
    def solved(self) -> bool:
        """Whether every test passed."""
        return self.status == "graded" and bool(self.tests) and self.passed == len(self.tests)


# -------- Asks a candidate in its sandbox, one call at a time, and believes nothing but well-formed values

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
            **_sources(candidate_driver, code_values),
        }
        self._sandbox = sandbox
        self._limits = replace(limits, output_bytes=max(limits.output_bytes, REPLIES))
        self._session: Session | None = None
        self._starts = 0
        self.lost = ""
        """Why it answers no more, until `renew`; empty while it does."""

    def start(self) -> None:
        """Start it, so that it is ready when it is asked. Raises SandboxError."""
        self._starts += 1
        self.lost = ""
        command = _driver_command(self._sandbox, "candidate_driver")
        self._session = start(self._sandbox, self._files, command, self._limits)

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
            self.lost = "it sent something that is not a reply to its question"
        except ValueFault as fault:
            self.lost = f"it sent {fault}"
        raise CandidateGone(self.lost)

    def carry(self, question: bytes) -> bytes:
        """Return the text of its reply to the text of a question, unchecked. Raises CandidateGone like `ask`."""
        if self.lost:
            raise CandidateGone(self.lost)
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
            self.lost = "it sent something that is not a reply to its question"
        else:
            result = self._session.finish(kill=True)
            self.lost = (
                f"it reached its limit of {result.limit}" if result.limit else "it ended without an answer"
            )
        raise CandidateGone(self.lost)

    def renew(self) -> None:
        """Let the next question start it afresh, if it was lost and has starts left."""
        if self.lost and self._starts < MOST_STARTS:
            self.close()
            self._session, self.lost = None, ""

    def close(self) -> None:
        """End it."""
        if self._session is not None:
            self._session.finish(kill=True)


_REPLY = ("kind", "content", "changes", "kept", "printed")


@functools.cache
def _sources(*modules: ModuleType) -> dict[str, bytes]:
    """Return the files of modules, which are copied into sandboxes as they stand."""
    return {
        f"{module.__name__.replace('.', '/')}.py": Path(str(module.__file__)).read_bytes()
        for module in modules
    }


def _driver_command(sandbox: Backend, driver: str, *arguments: str) -> list[str]:
    """Return the command of a driver: isolated from the environment and the user's packages."""
    begin = f"import sys; sys.path.insert(0, ''); from kapelle.grading.code.{driver} import serve; serve()"
    return [sandbox.python, "-I", "-B", "-c", begin, *arguments]


# -------- Grades programs by test programs, in two sandboxes


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Tests that are programs of their own: asserts, or a `check` function with its call."""

    programs: tuple[str, ...]
    """Each is one test: it passes when it runs to its end."""
    setup: str = ""
    """Runs once before the tests; what it defines is theirs."""
    candidate: tuple[str, ...] = ()
    """Names that are the candidate's, even where Python or the setup define them too: any other name that the tests use and
    do not define is their own fault, and nothing is graded. Empty: what they do not define is the candidate's, unless it is
    one of several and looks like a forgotten import (`Counter`, `np`)."""


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
        command = _driver_command(sandbox, "test_driver", str(count), *tests.candidate)
        programs = {f"test_{index}.py": text.encode() for index, text in enumerate(tests.programs)}
        session = ready.start(
            {
                **programs,
                "setup.py": tests.setup.encode(),
                **_sources(test_driver, remote, rewritten_calls, rewriting, code_values),
            },
            command,
        )
        return _carry(candidate, session, count, limits.wall_s * (count + 1))
    finally:
        candidate.close()
        if session is not None:
            session.finish(kill=True)
        ready.discard()


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
            # The candidate's reply goes on as it stands, or why there is none behind `!`: it is read in the tests' sandbox.
            try:
                reply = candidate.carry(line[1:])
            except CandidateGone as gone:
                reply = b"!" + encode(f"{gone}").encode()
            tests.send(reply + b"\n")
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


# -------- Grades programs by calls with known results, compared here: one sandbox, no test program


@dataclass(frozen=True, slots=True)
class CallTest:
    """One call and what it must return."""

    function: str
    arguments: tuple[Plain, ...]
    expected: Plain
    """Never leaves this process."""
    keywords: Mapping[str, Plain] = field(default_factory=dict)
    tolerance: float = 0.0
    """Most by which finite floats may differ, absolutely or relative to the expected one; whole numbers are exact."""
    one_of_one: bool = False
    """Whether an expected list of one item also stands for the item, and a tuple may be returned for a list, and a number be a key for its text: APPS's rule."""


def grade_calls(
    solution: str, tests: tuple[CallTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Call a solution once for each test and compare what it returns; one that is lost is started again.

    Raises SandboxError when the machine cannot give a sandbox, ValueFault for arguments that have no encoding.
    """
    for test in tests:
        encode((test.arguments, dict(test.keywords)))
    if not tests:
        return CodeGrade((), "ungraded", "there is no test")
    candidate = Candidate(solution, sandbox, limits or Limits())
    try:
        return CodeGrade(tuple(_outcome_of_call(candidate, test) for test in tests))
    finally:
        candidate.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Stays:
    """An object that stays with the candidate."""

    number: str
    nature: str


def _resolve(kind: str, *parts: Plain) -> Plain:
    """Return what stands here for a part of a reply: objects stay, values of the candidate's classes are the values that they are."""
    if kind == "object" and list(map(type, parts)) == [str, str]:
        return _Stays(*parts)
    if kind in ("sub", "nan"):
        return parts[0]
    raise ValueFault(f"the unknown kind {kind[:20]!r}")


def _outcome_of_call(candidate: Candidate, test: CallTest) -> TestOutcome:
    ask = functools.partial(
        candidate.ask,
        refer=lambda value: ("object", value.number) if isinstance(value, _Stays) else None,
        resolve=_resolve,
    )
    try:
        kind, found = ask("call named", test.function, test.arguments, dict(test.keywords))
        if kind == "value" and isinstance(found, _Stays) and found.nature == "coroutine":
            kind, found = ask("await", found)
        if kind == "value" and isinstance(test.expected, list):
            # A right result has as many items at most.
            inside = (item for item in test.expected if test.one_of_one and isinstance(item, list))
            kind, found = _listed(ask, found, max(len(test.expected), *map(len, inside), 0))
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not answer: {gone}")
    if kind == "error":
        names, text, *_ = found if type(found) is tuple and len(found) > 1 else (("an error",), "")
        return TestOutcome("error", f"{names[0] if names else 'an error'}: {text}"[:500])
    try:
        right = same_value(found, test.expected, test.tolerance)
        if not right and test.one_of_one:
            listed = isinstance(test.expected, list) and len(test.expected) == 1
            right = any(
                same_value(_as_json(found, expected), expected, test.tolerance)
                for expected in (test.expected, *(test.expected if listed else ()))
            )
    except RecursionError:  # what is right is as deep as what is expected
        right = False
    return TestOutcome("passed") if right else TestOutcome("failed", "the call returned another value")


def _as_json(value: Plain, like: Plain) -> Plain:
    """Return a value as JSON would say it: with a list for each tuple, and a text for each key where a text is expected."""
    value = plain(value)
    if isinstance(value, (list, tuple)) and isinstance(like, list) and len(value) == len(like):
        return [_as_json(item, each) for item, each in zip(value, like, strict=True)]
    if isinstance(value, dict) and isinstance(like, dict):
        found = {}
        for key, item in value.items():
            told = json.dumps(key) if isinstance(key, (bool, int, float)) or key is None else key
            name = told if type(key) is not str and told in like and told not in value else key
            found[name] = _as_json(item, like.get(name))
        return found
    return value


def _listed(ask: Callable[..., tuple[str, Plain]], found: Plain, size: int) -> tuple[str, Plain]:
    """Return a reply with the items of a range, a generator or another object that is iterated, one past `size` at most."""
    value: Any = plain(found)
    if type(value) in (range, *_VIEWS):
        return "value", list(islice(value, size + 1))
    if not isinstance(value, _Stays):
        return "value", value
    kind, found = ask("iterate", value)
    if kind == "value" and isinstance(found, _Stays):
        kind, found = ask("take", found, size + 1)
        return kind, found[0] if kind == "value" and type(found) is tuple and found else found
    return kind, found


_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def same_value(got: Plain, expected: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two values of built-in types are the same: types too, save that 2 and 2.0 are one number.

    NaN is the same as nothing, so it never matches; a list is never a tuple, a set never a frozenset, and `{True}` not `{1}`.
    """
    left = [(got, expected)]  # values may be nested deeper than calls
    while left:
        one, other = map(plain, left.pop())
        if _is_number(one) and _is_number(other):
            same = one == other
            # Whole numbers are exact.
            if not same and tolerance and isinstance(one, float) and isinstance(other, float):
                same = math.isfinite(one) and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        elif type(one) is not type(other):
            same = False
        elif isinstance(other, (list, tuple)):
            same = len(one) == len(other)
            left += zip(one, other, strict=False)
        elif isinstance(other, (set, frozenset)):
            same = set(map(_exact, one)) == set(map(_exact, other))
        elif isinstance(other, dict):
            ours, theirs = ({_exact(key): each[key] for key in each} for each in (one, other))
            same = ours.keys() == theirs.keys()
            left += [(ours[key], theirs[key]) for key in theirs] if same else []
        else:
            same = bool(one == other)
        if not same:
            return False
    return True


def _exact(key: Plain) -> Plain:
    """Return a key that equals only keys of the same type, numbers aside."""
    if isinstance(key, (tuple, frozenset)):
        return type(key), type(key)(map(_exact, key))
    return int if _is_number(key) else type(key), key


def _is_number(value: Plain) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -------- Grades programs by what they print for an input; the comparison happens here, after the program is gone

_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40}|[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")
_REAL = re.compile(r".*[.eE].*")
_ONE_DECIMAL = re.compile(r"[+-]?[0-9]+\.[1-9]")
_SPACES = re.compile(r"[ \t\r\f\v]+")
MOST_STOPPED = 3
"""Tests in which one program may reach a limit: a problem may have hundreds of tests, and each would take as long."""
MOST_SECONDS = 20
"""How many times the limit of one test all tests of a program may take together on the clock."""


@dataclass(frozen=True, slots=True)
class OutputTest:
    """One input and what must be printed for it."""

    stdin: str
    stdout: str
    """Never enters the sandbox."""
    tolerance: float = 1e-6
    """Most by which a printed number may differ, absolutely or relatively, where this one has a point or an
    exponent; whole numbers must match digit by digit, and so must `1.1` and `1.10`."""


def grade_output(
    solution: str, tests: tuple[OutputTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Run a program once for each test and compare its standard output; a program that is out of its time is run no more.

    Raises SandboxError when the machine cannot give a sandbox.
    """
    limits = limits or Limits()
    files = {"solution.py": runnable(solution).encode("utf-8", "surrogatepass")}
    command = [sandbox.python, "-I", "-B", "solution.py"]
    outcomes, stopped, seconds = list[TestOutcome](), 0, 0.0
    for test in tests:
        if stopped == MOST_STOPPED or seconds > MOST_SECONDS * limits.wall_s:
            outcomes.append(TestOutcome("not_run", "the program had used up its time in earlier tests"))
            continue
        result = run(sandbox, files, command, test.stdin.encode(), limits)
        stopped, seconds = stopped + (result.limit is not None), seconds + result.wall_s
        outcomes.append(_outcome_of_output(result, test))
    return CodeGrade(tuple(outcomes))


def _outcome_of_output(result: Result, test: OutputTest) -> TestOutcome:
    if result.limit is not None:
        return TestOutcome("error", f"the program reached its limit of {result.limit}")
    try:
        printed = result.stdout.decode("utf-8")
    except UnicodeDecodeError:
        return TestOutcome("failed", "the output is not text in UTF-8")
    same = same_output(printed, test.stdout, test.tolerance)
    if same and result.ok:
        return TestOutcome("passed")
    said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if same:
        ended = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
        return TestOutcome("error", "; ".join([f"the program ended with {ended}", *said])[:500])
    shown = repr(printed.strip()[:200]) if printed.strip() else "nothing"
    return TestOutcome("failed", "; ".join([f"the program printed {shown}", *said])[:500])


def same_output(printed: str, expected: str, tolerance: float = 1e-6) -> bool:
    """Return whether two outputs say the same: the same lines of the same words.

    Spaces and tabs between words, at line ends and empty lines at the end do not count; line breaks do.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    # Python's own `split` takes U+001C and a dozen other characters for spaces.
    lines = [_SPACES.split(line.strip(" \t\r\f\v")) for line in text.replace("\r\n", "\n").split("\n")]
    lines = [words if words != [""] else [] for words in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(printed: str, expected: str, tolerance: float) -> bool:
    if printed == expected:
        return True
    if not (_REAL.fullmatch(expected) and _DECIMAL.fullmatch(expected) and _DECIMAL.fullmatch(printed)):
        return False
    # `1.1` and `1.10` are one number, and two versions, sections or prices.
    short, long = sorted((printed, expected), key=len)
    if long == f"{short}0" and _ONE_DECIMAL.fullmatch(short):
        return False
    a, b = float(printed), float(expected)
    return math.isfinite(a) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
