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
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from kapelle.grading.code import channel, raised, remote
from kapelle.grading.code.channel import say
from kapelle.grading.code.remote import Remote
from kapelle.grading.code.values import ValueFault

_EXPECTS = {"raises", "assertRaises", "suppress"}
"""Calls whose arguments are classes of exceptions."""
_FORGOTTEN = frozenset(
    [
        "ChainMap",
        "Counter",
        "Decimal",
        "Fraction",
        "OrderedDict",
        "Path",
        "deepcopy",
        "defaultdict",
        "deque",
        "heapify",
        "heappop",
        "heappush",
        "isclose",
        "isinf",
        "isnan",
        "lru_cache",
        "namedtuple",
        "nlargest",
        "nsmallest",
        "np",
        "numpy",
        "pandas",
        "pd",
        "plt",
        "pytest",
        "reduce",
        "timedelta",
        "torch",
        "zip_longest",
        "Any",
        "Callable",
        "Dict",
        "Iterable",
        "List",
        "Optional",
        "Sequence",
        "Tuple",
        "Union",
    ]
)
"""What tests mean by these names, where they forgot to import them, nobody else defines."""


def missing_names(programs: list[str]) -> list[str]:
    """Return the names that programs use and neither define nor import, built-in ones left out."""
    used = {
        node.id for node in _nodes(programs) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return sorted(used - _defined(programs) - set(vars(builtins)))


def _defined(programs: list[str]) -> set[str]:
    """Return the names that programs define or import."""
    nodes = _nodes(programs)
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined |= {node.name for node in nodes if isinstance(node, kinds)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return defined


def _nodes(programs: list[str]) -> list[ast.AST]:
    return [node for program in programs for node in ast.walk(ast.parse(program))]


def _expected_exceptions(programs: list[str]) -> set[str]:
    """Return the names that programs use as classes of exceptions."""
    nodes = _nodes(programs)
    kinds: list[ast.AST] = [node.type for node in nodes if isinstance(node, ast.ExceptHandler) and node.type]
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            kinds += node.args if name in _EXPECTS else []
    inside = [part for kind in kinds for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {part.id for part in inside if isinstance(part, ast.Name)}


def _nobodys(missing: list[str], candidates_own: list[str]) -> list[str]:
    """Return the missing names that are not the candidate's to define: the tests forgot to import them."""
    strange = [name for name in missing if name not in candidates_own and name not in sys.stdlib_module_names]
    if candidates_own:
        return strange
    found = [name for name in strange if name in _FORGOTTEN]
    # A single name is what is asked for, whatever it is called.
    return found if len(strange) > 1 else []


def _namespace(programs: list[str], candidates_own: list[str]) -> dict[str, Any]:
    missing = missing_names(programs)
    nobodys = _nobodys(missing, candidates_own)
    if nobodys:
        raise NameError(f"nobody defines {', '.join(nobodys)}")
    found: dict[str, Any] = {}
    exceptions = _expected_exceptions(programs)
    called = {getattr(node.func, "id", "") for node in _nodes(programs) if isinstance(node, ast.Call)}
    for name in (*missing, *candidates_own):
        # A module that a test forgot to import is the real one, never the candidate's; what is called is no module.
        is_module = name in sys.stdlib_module_names and name not in {*candidates_own, *called}
        own = raised.exception_class(name) if name in exceptions else Remote(name)
        found[name] = importlib.import_module(name) if is_module else own
    asked = [name for name in missing if isinstance(found[name], Remote)]
    try:
        return {**found, **(remote.values_of(asked) if asked else {})}
    except Exception:  # noqa: BLE001 (the candidate's; a test will show it)
        return found


def run_all(count: int, candidates_own: list[str]) -> None:
    """Run the setup and the tests, and say how each went."""
    names = ["setup.py", *(f"test_{index}.py" for index in range(count))]
    programs = [Path(name).read_text(encoding="utf-8") for name in names]
    try:
        namespace = _namespace(programs, candidates_own)
    except (SyntaxError, NameError) as error:
        say("broken", f"a test is not a program: {error}")
        return
    own = {name: namespace[name] for name in candidates_own}
    begun = _begin(namespace, count)
    if begun is None:
        return
    namespace.update(begun, **own)
    for index in range(count):
        remote.begin(programs[index + 1], _defined(programs))
        outcome = _run(f"test_{index}.py", namespace)
        if outcome[0] == "broken":
            say(*outcome)
            return
        say("result", index, *outcome)
    say("done")


def _begin(namespace: dict[str, Any], count: int) -> dict[str, Any] | None:
    """Run the setup and return what it defines; None where that failed, which is said."""
    try:
        defined = runpy.run_path("setup.py", init_globals=namespace, run_name="setup")
    except Exception as error:  # noqa: BLE001 (whatever it is, it is said whose fault it is)
        shown = f"{type(error).__name__}: {error}"[:500]
        if _is_the_tests_fault(error, "setup.py"):
            say("broken", f"the setup of the tests failed: {shown}")
            return None
        for index in range(count):
            say("result", index, "error", shown)
        say("done")
        return None
    return {name: value for name, value in defined.items() if not name.startswith("__")}


def _run(path: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """Run one test and return how it went."""
    try:
        runpy.run_path(path, init_globals=namespace, run_name="test")
    except AssertionError as error:
        return "failed", f"{error}"[:500] or "the assertion does not hold"
    except Exception as error:  # noqa: BLE001 (a test that raises has not passed, whatever it raises)
        shown = f"{type(error).__name__}: {error}"[:500]
        lacks = isinstance(error, (ImportError, NameError, ValueFault))
        if lacks and _is_the_tests_fault(error, path):
            return "broken", f"a test lacks what it needs: {shown}"
        return "error", shown
    return "passed", ""


def _is_the_tests_fault(error: Exception, path: str) -> bool:
    """Return whether a program would have failed with any candidate: else what one says could leave it ungraded."""
    if raised.is_candidates(error):
        return False
    if not channel.heard() or isinstance(error, (ImportError, remote.NotSent)):
        return True
    if not isinstance(error, NameError):
        return False
    # `for item in f(3): last = item` gives `last` no value where nothing is returned.
    own = _defined([Path(name).read_text(encoding="utf-8") for name in ("setup.py", path)])
    return not isinstance(error, UnboundLocalError) and error.name not in own


def serve() -> None:
    """Run the tests that the arguments name (their number, and names that are the candidate's)."""
    with os.fdopen(os.dup(0), "rb") as replies, os.fdopen(os.dup(1), "wb") as requests:
        channel.connect(requests, replies)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        run_all(int(sys.argv[1]), sys.argv[2:])
