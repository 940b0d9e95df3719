"""Runs inside the tests' sandbox: runs test programs, which call the candidate by message.

Each test is a file `test_0.py`, …, run after a copy of `setup.py`'s names. The candidate's names stand for messages:
using one sends a request and waits for the reply. What comes back is of built-in types, or stands for what stays in the
candidate's process (`remote.py`). Messages are one line each, typed values: the requests of `candidate_driver.py`, and

    ("result", test, "passed" | "failed" | "error", explanation) | ("done",) | ("broken", explanation)

Standard library and the encoding only: the files are copied into sandboxes as they stand.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.abc
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kapelle.grading.code import remote, rewritten_calls
from kapelle.grading.code.remote import Channel, Remote, say
from kapelle.grading.code.rewriting import PREFIX, classes, defined_names, parsed, rewritten, speaks_of_nan
from kapelle.grading.code.values import ValueFault

_EXPECTS = {"raises": 1, "assertRaises": 1, "assertRaisesRegex": 1, "suppress": None}
"""Calls whose first arguments, so many of them, are classes of exceptions."""
_FORGOTTEN = frozenset({
    "ChainMap", "Counter", "Decimal", "Fraction", "OrderedDict", "Path", "deepcopy", "defaultdict", "deque", "heapify", "heappop",
    "heappush", "isclose", "isinf", "isnan", "lru_cache", "namedtuple", "nlargest", "nsmallest", "np", "numpy", "pandas", "pd", "plt",
    "pytest", "reduce", "timedelta", "torch", "zip_longest",
    "Any", "Callable", "Dict", "Iterable", "List", "Optional", "Sequence", "Tuple", "Union",
})  # fmt: skip
"""Names that tests forgot to import, rather than names of the candidate's."""


def missing_names(programs: list[ast.Module]) -> list[str]:
    """Return the names that programs use and neither define nor import, built-in ones left out."""
    nodes = [node for program in programs for node in ast.walk(program) if isinstance(node, ast.Name)]
    used = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
    if used & {"eval", "exec"}:
        # The texts that are evaluated use names, too.
        constants = [
            node for program in programs for node in ast.walk(program) if isinstance(node, ast.Constant)
        ]
        for text in (node.value for node in constants if isinstance(node.value, str)):
            with contextlib.suppress(SyntaxError):
                used |= {name.id for name in ast.walk(parsed(text)) if isinstance(name, ast.Name)}
    known = {"__name__", "__file__", "__doc__", *vars(builtins)}
    return sorted(used.difference(known, *map(defined_names, programs)))


def _expected_exceptions(programs: list[ast.Module]) -> set[str]:
    """Return the names that programs use as classes of exceptions."""
    nodes = [node for program in programs for node in ast.walk(program)]
    kinds: list[ast.AST] = [node.type for node in nodes if isinstance(node, ast.ExceptHandler) and node.type]
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            kinds += node.args[: _EXPECTS[name]] if name in _EXPECTS else []
    inside = [part for kind in kinds for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {part.id for part in inside if isinstance(part, ast.Name)}


class _Loader(importlib.abc.InspectLoader):
    """Runs a program of the tests as the module that it is given."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code

    def get_code(self, _: str) -> types.CodeType:
        return self._code

    def get_source(self, _: str) -> None:
        """Return None: the program runs as it was rewritten."""


class Broken(Exception):
    """The tests cannot be run with any candidate."""


class _Tests:
    """The setup and the tests, read and rewritten, and the names that they share."""

    def __init__(self, setup: str, programs: list[str], candidates_own: list[str]) -> None:
        self._trees = [parsed(text) for text in (setup, *programs)]
        missing = missing_names(self._trees)
        # Names that are not the candidate's to define: the tests forgot to import them.
        undefined = [
            name for name in missing if name not in candidates_own and name not in sys.stdlib_module_names
        ]
        if not candidates_own:
            # A single name is what is asked for, whatever it is called.
            undefined = [name for name in undefined if name in _FORGOTTEN] if len(undefined) > 1 else []
        if undefined:
            listed = ", ".join(undefined)
            raise Broken(f"it uses {listed}, which it has to define or import, or name as the candidate's")
        exceptions = _expected_exceptions(self._trees)
        names = [node for tree in self._trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
        called = {
            getattr(node.func, "id", "")
            for tree in self._trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        # A module that a test forgot to import is the real one, never the candidate's; what is called is no module.
        modules = {name for name in missing if name in sys.stdlib_module_names} - {*candidates_own, *called}
        self.names: dict[str, Any] = {name: importlib.import_module(name) for name in modules}
        for name in exceptions & {*missing}:
            handled = sum(node.id == name for node in names) > 0 and name in called
            self.names[name] = (
                name
                if handled or "issubclass" in {node.id for node in names}
                else remote.exception_class(name)
            )
        self._asked = [name for name, found in self.names.items() if found == name]
        self._candidates = [name for name in {*missing, *candidates_own} if name not in self.names]
        self.own = {name: Remote(name, is_name=True) for name in self._candidates}
        self.names |= self.own
        for tree in self._trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and any(
                    getattr(base, "id", "") in self.own for base in node.bases
                ):
                    raise Broken(f"its class {node.name} derives from one of the candidate's")
        self.used = {node.id for node in names} | {
            name
            for tree in self._trees
            for node in ast.walk(tree)
            for name in (
                [node.attr]
                if isinstance(node, ast.Attribute)
                else [each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)]
            )
        }
        self.defined = {name for tree in self._trees for name in defined_names(tree)}
        defined_by_setup = defined_names(self._trees[0])
        self._codes: list[Any] = []
        for index, tree in enumerate(self._trees):
            said = {
                "takes_nan": any(speaks_of_nan(each, self.own) for each in (tree, self._trees[0])),
                "classes": classes(tree, self.defined - {*candidates_own}),
                "texts": {
                    each.value
                    for each in ast.walk(tree)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                },
            }
            own = [name for name in self._candidates if index or name not in defined_by_setup]
            path = f"test_{index - 1}.py" if index else "setup.py"
            self._codes.append((_Loader.source_to_code(rewritten(tree, own), path), said))

    def ask_exceptions(self) -> None:
        """Ask what those exceptions of the candidate's derive from that the tests raise or inspect."""
        for name in self._asked:
            try:
                kind = rewritten_calls.value(name)
                above = [each.__name__ for each in kind.__mro__]
            except Exception:  # noqa: BLE001 (the candidate's; a test will show it)
                above = []
            self.names[name] = remote.exception_class(name, above)
        self._asked = []

    def run(self, index: int, namespace: dict[str, Any]) -> dict[str, Any]:
        """Run the setup (0) or a test and return the names that are there at the end."""
        code, said = self._codes[index]
        remote.begin(**said)
        module = types.ModuleType("test" if index else "setup")
        # What a class or a function of the setup's asks for belongs to its module.
        sys.modules[module.__name__] = module
        # `unittest.main()` looks for its tests there.
        sys.modules["__main__"] = module
        known = {f"{PREFIX}{name}": helper for name, helper in rewritten_calls.HELPERS.items()}
        vars(module).update({**namespace, **known, "__file__": code.co_filename})
        _Loader(code).exec_module(module)
        return {name: value for name, value in vars(module).items() if not name.startswith(("__", PREFIX))}


def run_all(count: int, candidates_own: list[str]) -> None:
    """Run the setup and the tests, and say how each went."""
    setup, *programs = [
        Path(name).read_text(encoding="utf-8")
        for name in ("setup.py", *(f"test_{index}.py" for index in range(count)))
    ]
    try:
        tests = _Tests(setup, programs, candidates_own)
    except SyntaxError as error:
        say("broken", f"a test is not a program: {error}")
        return
    except Broken as error:
        say("broken", f"a test cannot be run: {error}")
        return
    empty = _decides_nothing(tests, count)
    # What is printed and read, and functions that look into objects, meet the candidate where tests have to do with them.
    rewritten_calls.apply_where_objects_are(tests.used)
    prints = bool(tests.used & {"redirect_stdout", "stdout", "StringIO"})
    reads = bool(tests.used & {"stdin", "input", "patch"})
    if prints or reads:
        remote.ask("capture", prints, _read_line if reads else None)
        Channel.heard = False
    try:
        tests.ask_exceptions()
        namespace = tests.run(0, tests.names) | tests.own
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is said whose fault it is)
        shown = f"{type(error).__name__}: {error}"[:500]
        if _is_the_tests_fault(error, tests.defined):
            say("broken", f"the setup of the tests failed: {shown}")
            return
        for index in range(count):
            say("result", index, "error", shown)
        say("done")
        return
    for index in range(count):
        outcome = _run(tests, index, namespace)
        if outcome[0] == "passed" and index in empty:
            outcome = "not_run", "it passes whatever the program does"
        say(*(outcome if outcome[0] == "broken" else ("result", index, *outcome)))
        if outcome[0] == "broken":
            return
    if empty:
        shown = ", ".join(map(str, empty))
        say(
            "broken",
            f"test {shown} passes whatever the program does: no check in it is ever run, or none can fail",
        )
    say("done")


_TRY_SECONDS = 2
"""CPU time for trying the tests with no candidate at all, before the candidate is asked anything."""


def _decides_nothing(tests: _Tests, count: int) -> list[int]:
    """Return the tests that reach their end with any candidate: they would pay every one.

    A process of its own runs each with a candidate of which nothing is true, and again with one that raises at every
    call. Functions that are never called, main guards, coroutines that are never awaited, and swallowed failures pass
    both.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            # A test that takes long decides something: it is what the candidate's limits are for.
            signal.setitimer(signal.ITIMER_VIRTUAL, _TRY_SECONDS)
            time.sleep = lambda _: None
            sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until it ends)
            for index in range(count):
                Nothing.failed = False
                if _passes(tests, index, lambda *_: Nothing()):
                    checks = Channel.checks
                    # A failure was swallowed, or nothing fails, or nothing is checked.
                    if Nothing.failed or _passes(tests, index, _fails) or checks + Channel.checks == 0:
                        os.write(write, f"{index} ".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found = [int(index) for index in said.read().split()]
    os.waitpid(child, 0)
    return found


def _passes(tests: _Tests, index: int, stand_in: Callable[..., Any]) -> bool:
    Channel.stand_in = stand_in
    try:
        namespace = tests.run(0, tests.names)
        tests.run(index + 1, {**namespace, **tests.own})
    except SystemExit as error:
        return error.code in (None, 0)
    except BaseException:  # noqa: BLE001 (whatever it is, the test did not reach its end)
        return False
    return not Channel.refused


def _fails(operation: str, *_: Any) -> Any:
    if operation in ("call", "await", "apply"):
        raise remote.CandidateError("there is no candidate")
    return Nothing()


class Nothing:
    """A candidate whose every result is itself again; a condition on it fails as an assert does."""

    failed = False
    """Whether a condition failed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Any:
        return iter([self])

    def __len__(self) -> int:
        return 1

    def __await__(self) -> Any:
        yield from ()
        return self

    def __exit__(self, *_: object) -> None:
        return None

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def __aiter__(self) -> Any:
        yield self

    def __str__(self) -> str:
        return "nothing"

    __repr__ = __str__


def _no_value(*_: Any) -> Any:
    Nothing.failed = True
    raise AssertionError("there is no candidate")


_SAME_AGAIN = (
    *("__call__", "__enter__", "__getitem__", "__setitem__", "__delitem__", "__next__", "__anext__", "__neg__", "__pos__", "__abs__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__invert__", "__round__", "__divmod__", "__rdivmod__"),
    *(f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")),
    *(f"__{side}{name}__" for side in ("", "r") for name in ("and", "or", "xor", "lshift", "rshift")),
)  # fmt: skip
for _name in _SAME_AGAIN:
    setattr(Nothing, _name, lambda self, *_, **__: self)
for _name in ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__hash__", "__contains__"):
    setattr(Nothing, _name, _no_value)


def _read_line(*prompt: str) -> str:
    # Not `input` itself, which a test may replace.
    return input(*prompt)


def _run(tests: _Tests, index: int, namespace: dict[str, Any]) -> tuple[str, str]:
    """Run one test and return how it went."""
    try:
        tests.run(index + 1, namespace)
    except AssertionError as error:
        if not Channel.heard:
            return "broken", f"test {index} fails before it asks the program anything"
        return "failed", f"{error}"[:500] or "the assertion does not hold"
    except SystemExit as error:
        if remote.is_candidates(error):
            return "error", "SystemExit: the program ended itself"
        if error.code not in (None, 0) and Channel.heard:
            return "failed", f"the test ended with {error.code!r}"[:500]
    except BaseException as error:  # noqa: BLE001 (a test that raises has not passed, whatever it raises)
        shown = f"{type(error).__name__}: {error}"[:500]
        lacks = isinstance(error, (ImportError, NameError, ValueFault))
        if lacks and _is_the_tests_fault(error, tests.defined):
            return "broken", f"a test lacks what it needs: {shown}"
        return "error", shown
    if not Channel.heard:
        return "broken", f"test {index} asks the program nothing"
    if Channel.lost or Channel.refused:
        return "error", Channel.lost or Channel.refused
    return ("passed", "") if Channel.checks else ("failed", "none of the checks was reached")


def _is_the_tests_fault(error: BaseException, defined: set[str]) -> bool:
    """Return whether a test would have failed with any candidate: no candidate's word may leave it ungraded."""
    if remote.is_candidates(error):
        return False
    if not Channel.heard or isinstance(error, (ImportError, remote.NotSent)):
        return True
    # `for item in f(3): last = item` gives `last` no value where nothing is returned.
    return (
        isinstance(error, NameError)
        and not isinstance(error, UnboundLocalError)
        and error.name not in defined
    )


def serve() -> None:
    """Run the tests that the arguments name (their number, and names that are the candidate's)."""
    # Numbers may have any number of digits, and values may nest deeper than Python's own limit.
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    with os.fdopen(os.dup(0), "rb") as replies, os.fdopen(os.dup(1), "wb") as requests:
        Channel.requests, Channel.replies = requests, replies
        count, candidates_own = int(sys.argv[1]), sys.argv[2:]
        # `unittest.main()` reads them.
        del sys.argv[1:]
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        run_all(count, candidates_own)
