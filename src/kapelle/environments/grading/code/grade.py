"""Grade programs in a sandbox; returned values and output are compared outside the sandbox.

`grade_calls` compares returned values with expected values, and `grade_output` compares the output of a program.
`grade_program` takes test programs and converts those that `literal_tests` can read to calls. All other test programs must run
in the candidate's process, and the candidate could then fake their results. Such tests must be allowed explicitly, and their
verdicts are not `trusted`. Exit codes and printed claims are never trusted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kapelle.environments.grading.code import candidate_driver, literal_tests, test_driver
from kapelle.environments.grading.code import values as code_values
from kapelle.environments.grading.code.checks import LiteralTest, Settling, UnfitValue
from kapelle.environments.grading.code.literal_tests import NotLiteral
from kapelle.environments.grading.code.programs import runnable
from kapelle.environments.grading.code.values import Plain, Stays, ValueFault, decode, encode
from kapelle.environments.sandbox.contract import Limits, Result
from kapelle.environments.sandbox.session import Backend, Session, run, start

# -------- The verdict of a grader on a program: the outcome of each test, and the score

TestStatus = Literal["passed", "failed", "error", "not_run"]


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """The outcome of one test of a program."""

    __test__ = False

    status: TestStatus
    """The outcome of the test. `passed` means that the test ran and its condition holds. `failed` means that the test ran and
    its condition is false. `error` means that the test did not finish. `not_run` means that the test was skipped."""
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class CodeGrade:
    """The verdict on one program: the outcomes of its tests and the score."""

    tests: tuple[TestOutcome, ...]
    status: Literal["graded", "ungraded"] = "graded"
    """Whether the program was graded. `ungraded` means that the tests themselves could not run, regardless of the candidate;
    the score of such a verdict must not be used as a reward."""
    explanation: str = ""
    trusted: bool = True
    """Whether the verdict can be trusted. False if the tests ran in the candidate's process, because the candidate could have
    faked their results."""

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return sum(test.status == "passed" for test in self.tests)

    @property
    def score(self) -> float:
        """The fraction of tests that passed, for partial credit; 0 if the program is ungraded."""
        return self.passed / len(self.tests) if self.tests and self.status == "graded" else 0.0

    @property
    def solved(self) -> bool:
        """Whether the program was graded and passed every test."""
        return self.status == "graded" and bool(self.tests) and self.passed == len(self.tests)


# -------- The candidate in its sandbox: one request at a time, and only well-formed replies are accepted

REPLIES = 64 * 1024**2
"""Maximum total size in bytes of the replies of a candidate."""
MOST_STARTS = 3
"""Maximum number of starts of one candidate. A candidate that exits during a test is started again for the next test."""


class CandidateGone(Exception):
    """Raised if a candidate does not reply because it exited, reached a limit, or sent an invalid reply."""


class CandidateError(Exception):
    """Raised if a candidate raises an exception; only the name and the message of this exception are used."""

    def __init__(self, found: Plain) -> None:
        name, text = found if type(found) is tuple and len(found) == 2 else ("", "")
        super().__init__(f"{name if type(name) is str else ''}: {text if type(text) is str else ''}"[:500])


class Candidate:
    """A solution in its own sandbox.

    The sandbox starts at the first request. If the candidate is lost, the sandbox is started again at the first request after
    `renew`.
    """

    def __init__(self, solution: str, sandbox: Backend, limits: Limits) -> None:
        self._files = {
            "solution.py": runnable(solution).encode("utf-8", "surrogatepass"),
            **_sources(candidate_driver, code_values),
        }
        self._sandbox = sandbox
        self._limits = replace(limits, output_bytes=max(limits.output_bytes, REPLIES))
        self._session: Session | None = None
        self._starts = 0
        self._lost = ""
        self.with_nan = True
        """Whether a returned value may contain NaN; if False, a NaN raises ValueFault."""

    def ask(self, operation: str, *parts: Plain, keep: bool = False) -> Plain:
        """Return the result of an operation of `candidate_driver`; with `keep`, return a reference to the resulting object.

        Raises CandidateError if the candidate raises an exception. Raises CandidateGone if the candidate is lost, until `renew`
        is called. Raises ValueFault for a request or a value that has no encoding.
        """
        request = encode((keep, operation, *parts)).encode()
        if self._lost:
            raise CandidateGone(self._lost)
        if self._session is None:
            self._starts += 1
            command = _driver_command(self._sandbox, "candidate_driver")
            self._session = start(self._sandbox, self._files, command, self._limits)
        # The mark ties a reply to its request; a program cannot know it in advance.
        mark = secrets.token_hex(8).encode()
        self._session.send(mark + b" " + request + b"\n")
        line = self._session.receive(self._limits.wall_s)
        if line is None:
            limit = self._session.finish(kill=True).limit
            self._lost = f"it reached its limit of {limit}" if limit else "it ended without a reply"
            raise CandidateGone(self._lost)
        found, kind, text = [*line.split(b" ", 2), b"", b""][:3]
        if found == mark and kind == b"value":
            return decode(text, with_nan=self.with_nan)
        if found == mark and kind == b"error":
            raise CandidateError(decode(text))
        self._lost = "it sent an invalid reply"
        raise CandidateGone(self._lost)

    def renew(self) -> None:
        """Allow the next request to start the candidate again if it was lost and has been started fewer than `MOST_STARTS` times."""
        if self._lost and self._starts < MOST_STARTS:
            self.close()
            self._session, self._lost = None, ""

    def close(self) -> None:
        """Stop the candidate and its sandbox."""
        if self._session is not None:
            self._session.finish(kill=True)


@functools.cache
def _sources(*modules: ModuleType) -> dict[str, bytes]:
    """Return the source files of modules, which are copied into sandboxes unchanged."""
    return {
        f"{module.__name__.replace('.', '/')}.py": Path(str(module.__file__)).read_bytes()
        for module in modules
    }


def _driver_command(sandbox: Backend, driver: str) -> list[str]:
    """Return the command that starts a driver isolated from environment variables and from the packages of the user."""
    begin = f"import sys; sys.path.insert(0, ''); from kapelle.environments.grading.code.{driver} import serve; serve()"
    return [sandbox.python, "-I", "-B", "-c", begin]


# -------- Grading by test programs: literal tests run here, others run in the candidate's process if that is allowed


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Tests that are programs: asserts, or a `check` function and a call of this function."""

    programs: tuple[str, ...]
    """The test programs. A test passes if its program runs to its end."""
    setup: str = ""
    """A program that runs once before the tests and defines names for them."""
    candidate: tuple[str, ...] = ()
    """Names that the candidate defines, even if Python also defines them. If empty, these are all names that the tests do not
    define."""
    classes: tuple[str, ...] | None = None
    """Names of the classes that the candidate defines. If None, these are all names in CapWords."""


@functools.lru_cache(maxsize=4096)
def read_literal(tests: ProgramTests) -> tuple[LiteralTest, ...]:
    """Convert test programs to calls with known values.

    Raises NotLiteral with the reason if a test cannot be converted, and SyntaxError if a program is invalid.
    """
    for program in (tests.setup, *tests.programs):
        literal_tests.parsed(program)
    return tuple(
        literal_tests.read_test(program, tests.setup, tests.candidate, tests.classes)
        for program in tests.programs
    )


def grade_program(
    solution: str,
    tests: ProgramTests,
    sandbox: Backend,
    limits: Limits | None = None,
    *,
    allow_untrusted: bool = False,
) -> CodeGrade:
    """Run test programs against a solution and return the verdict.

    If `allow_untrusted` is True, tests that are not literal run in the process of the solution, which the solution can exploit;
    otherwise the verdict for such tests is `ungraded`. `limits` apply to each start of the candidate. Raises SandboxError if no
    sandbox is available.
    """
    limits = limits or Limits()
    try:
        literal = read_literal(tests)
    except SyntaxError as error:
        return CodeGrade((), "ungraded", f"a test is not a valid program: {error}")
    except NotLiteral as reason:
        if allow_untrusted:
            return _grade_beside(solution, tests, sandbox, limits)
        why = f"a program could fake the results of these tests ({reason}); they run only with `allow_untrusted`"
        return CodeGrade((), "ungraded", why, trusted=False)
    candidate = Candidate(solution, sandbox, limits)
    try:
        return CodeGrade(tuple(_outcome_of_test(candidate, test) for test in literal))
    finally:
        candidate.close()


def _outcome_of_test(candidate: Candidate, test: LiteralTest) -> TestOutcome:
    candidate.with_nan = test.names_nan
    settling = Settling(candidate.ask, test.names_nan)
    try:
        for step in test.steps:
            if step.asserts and not settling.truth(step.value):
                return TestOutcome("failed", "the assertion does not hold")
            settling.given(step.value)
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not reply: {gone}")
    except CandidateError as error:
        return TestOutcome("error", f"{error}")
    except (ValueFault, UnfitValue) as fault:
        return TestOutcome("failed", f"the program returned {fault}"[:500])
    except Exception as error:  # noqa: BLE001 (whatever Python raises for a value of another type than the test expects)
        return TestOutcome(
            "failed", f"the returned value has the wrong type: {type(error).__name__}: {error}"[:500]
        )
    return TestOutcome("passed")


def _grade_beside(solution: str, tests: ProgramTests, sandbox: Backend, limits: Limits) -> CodeGrade:
    """Run test programs in the same process as a solution and return the verdict, which is not trusted."""
    if tests not in _decisive:
        # A test that passes without a solution is useless, and a missing import is a fault of the tests.
        for index, (status, said) in _beside("", tests, sandbox, limits).items():
            if status in ("passed", "broken"):
                why = said or f"test {index} passes regardless of the program"
                return CodeGrade((), "ungraded", why, trusted=False)
        _decisive.add(tests)
    found = _beside(solution, tests, sandbox, limits)
    missing = "error", "the tests ended early, or reached a limit"
    outcomes = (TestOutcome(*found.get(index, missing)) for index in range(len(tests.programs)))
    return CodeGrade(tuple(outcomes), trusted=False)


_decisive: set[ProgramTests] = set()
"""Tests that fail without a solution."""


def _beside(solution: str, tests: ProgramTests, sandbox: Backend, limits: Limits) -> dict[int, Any]:
    """Return the status and the explanation of each test that ran; the solution may have faked these results."""
    texts = {f"test_{index}.py": text for index, text in enumerate(tests.programs)}
    texts |= {"solution.py": runnable(solution), "setup.py": tests.setup}
    files = {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
    modules = sorted({name for text in (tests.setup, *tests.programs) for name in test_driver.imported(text)})
    token = secrets.token_hex(8)
    order = json.dumps([token, len(tests.programs), modules]).encode() + b"\n"
    command = _driver_command(sandbox, "test_driver")
    result = run(sandbox, {**files, **_sources(test_driver)}, command, order, limits)
    found = dict[int, Any]()
    for line in result.stdout.decode(errors="replace").splitlines():
        mark, _, text = line.partition(" ")
        if mark == token:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                index, status, said = json.loads(text)
                if status in ("passed", "failed", "error", "broken"):
                    found[int(index)] = status, str(said)
    return found


# -------- Grading by calls with known results


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call of a function and its expected result."""

    function: str
    arguments: tuple[Plain, ...]
    expected: Plain
    """The expected result, which is never sent to the sandbox."""
    keywords: Mapping[str, Plain] = field(default_factory=dict)
    tolerance: float = 0.0
    """Maximum absolute or relative difference between finite floats that are considered equal. Integers must be exactly equal."""
    rule: Literal["exact", "json", "apps"] = "exact"
    """Rule for the comparison with the expected result. With `exact`, value and type must match. With `json`, a tuple may
    replace a list, and a numeric key may replace a string key. With `apps`, the rule `json` applies, and an expected list of
    one item also accepts the item itself."""


def grade_calls(
    solution: str, tests: tuple[CallTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Call a solution once for each test and compare the result; a lost solution is started again for the next test.

    Raises SandboxError if no sandbox is available, and ValueFault for arguments that have no encoding.
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


def _outcome_of_call(candidate: Candidate, test: CallTest) -> TestOutcome:
    try:
        found = candidate.ask("call", test.function, test.arguments, dict(test.keywords))
        if isinstance(test.expected, list):
            # A correct result has at most this many items.
            inside = (item for item in test.expected if test.rule == "apps" and isinstance(item, list))
            most = max(len(test.expected), *map(len, inside), 0) + 1
            if isinstance(found, Stays) and found.nature == "iterator":
                found = candidate.ask("take", found, most)
            elif isinstance(found, _LISTED):
                found = list(islice(found, most))
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not reply: {gone}")
    except (CandidateError, ValueFault) as error:
        return TestOutcome("error", f"{error}")
    allowed = [test.expected]
    if test.rule == "apps" and isinstance(test.expected, list) and len(test.expected) == 1:
        allowed += test.expected
    for expected in allowed:
        value = found if test.rule == "exact" else _as_json(found, expected)
        if same_value(value, expected, test.tolerance):
            return TestOutcome("passed")
    return TestOutcome("failed", "the call returned another value")


_LISTED: tuple[Any, ...] = (range, deque, type({}.keys()), type({}.values()), type({}.items()))


def _as_json(value: Plain, like: Plain) -> Plain:
    """Return a value as in JSON: tuples become lists, and keys become strings where the expected value has strings."""
    if isinstance(value, (list, tuple)) and isinstance(like, list) and len(value) == len(like):
        return [_as_json(item, each) for item, each in zip(value, like, strict=True)]
    if isinstance(value, dict) and isinstance(like, dict):
        found = {}
        for key, item in value.items():
            written = json.dumps(key) if isinstance(key, (bool, int, float)) or key is None else key
            name = written if type(key) is not str and written in like and written not in value else key
            found[name] = _as_json(item, like.get(name))
        return found
    return value


def same_value(got: Plain, expected: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two values of built-in types have the same value and type, except that 2 equals 2.0.

    NaN never matches any value. A list never equals a tuple, a set never equals a frozenset, and `{True}` does not equal `{1}`.
    """
    if _is_number(got) and _is_number(expected):
        # Integers must be equal.
        if got != expected and tolerance and isinstance(got, float) and isinstance(expected, float):
            return math.isfinite(got) and math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        return bool(got == expected)
    if type(got) is not type(expected) and not (isinstance(got, Counter) and type(expected) is dict):
        return False
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(same_value, got, expected, [tolerance] * len(got)))
    if isinstance(expected, (set, frozenset)):
        return set(map(_exact, got)) == set(map(_exact, expected))
    if isinstance(expected, dict):
        ours, theirs = ({_exact(key): each[key] for key in each} for each in (got, expected))
        return ours.keys() == theirs.keys() and all(
            same_value(ours[key], theirs[key], tolerance) for key in theirs
        )
    return bool(got == expected)


def _exact(key: Plain) -> Plain:
    """Return a key that distinguishes values of different types, except that an integer and a float may be equal."""
    if isinstance(key, (tuple, frozenset)):
        return type(key), type(key)(map(_exact, key))
    return int if _is_number(key) else type(key), key


def _is_number(value: Plain) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -------- Grading by the output for an input, which is compared here after the program has ended

_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40}|[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")
_REAL = re.compile(r".*[.eE].*")
_SPACES = re.compile(r"[ \t\r\f\v]+")
MOST_STOPPED = 3
"""Number of tests in which a program may reach a limit before the remaining tests are skipped. A problem may have hundreds of
tests, and each of them may reach the time limit."""
MOST_SECONDS = 20
"""Maximum wall-clock time of all tests of a program, as a multiple of the time limit of one test."""


@dataclass(frozen=True, slots=True)
class OutputTest:
    """The input of a program and its expected output."""

    stdin: str
    stdout: str
    """The expected output, which is never sent to the sandbox."""
    tolerance: float = 1e-6
    """Maximum absolute or relative difference between a printed number and the expected number if the expected number has a
    decimal point or an exponent. Integers must match digit by digit."""


def grade_output(
    solution: str, tests: tuple[OutputTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Run a program once for each test and compare its standard output with the expected output.

    The remaining tests are skipped if the program has used up its time. Raises SandboxError if no sandbox is available.
    """
    limits = limits or Limits()
    files = {"solution.py": runnable(solution).encode("utf-8", "surrogatepass")}
    command = [sandbox.python, "-I", "-B", "solution.py"]
    outcomes, stopped, seconds = list[TestOutcome](), 0, 0.0
    for test in tests:
        if stopped == MOST_STOPPED or seconds > MOST_SECONDS * limits.wall_s:
            outcomes.append(TestOutcome("not_run", "the program had used up its time in earlier tests"))
            continue
        # The expected output may be longer than the limit, which is raised if necessary.
        room = max(limits.output_bytes, 2 * len(test.stdout.encode()))
        result = run(sandbox, files, command, test.stdin.encode(), replace(limits, output_bytes=room))
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
    """Return whether two outputs have the same lines with the same words.

    The amount of space between words, spaces at the ends of lines and empty lines at the end are ignored. Line breaks are
    compared.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    # Python's `split` treats U+001C and a dozen other characters as spaces.
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
    a, b = float(printed), float(expected)
    return math.isfinite(a) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
