"""Break the library on purpose and see that its tests notice: `python -m tests.mutations [--changed] [--jobs 2]`.

`mutants.toml` lists the mistakes. Each is made in a temporary copy of `src`, the tests that it names run against
that copy, and every one of them must have a failure. Nothing in the working tree is written. It ends with 1 when a
mutant survives, when its code is not found exactly once, or when a named test fails without any mutant.

A mutant is found by syntax tree. `function` is looked up in every module of `room`, and `original`, an expression,
statements or a keyword argument, must stand exactly once in it. Layout, comments and quotes are of no account, and
where nothing matches literally, local variables and parameters may have other names; `broken` is renamed alike. A body
of `...` in `original` stands for any body, and `...` in `broken` for that body. Only the text of what matched changes.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import functools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
SUITE = "not sandbox_full and not vllm and not ranks and not models and not types and not apps"
"""Tests that a mutant may name: those of `make test`, and those that take long."""
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
BODIES = ("body", "orelse", "finalbody")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SIDE_ISSUES = {"type_comment", "kind", "type_params"}
"""Fields of syntax trees that change nothing of what code does."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break one function."""

    name: str
    room: str
    """A module or package below `kapelle`, with dots. The shorter it is, the more files may be joined without a change."""
    function: str
    """Qualified name of a function, method or class, or of what a module or a class assigns."""
    original: str
    broken: str
    """What stands there instead; empty deletes."""
    tests: tuple[str, ...]

    @property
    def selected(self) -> tuple[str, ...]:
        """The tests as pytest names them from the root."""
        return tuple(f"tests/{test}" for test in self.tests)


class MisplacedError(Exception):
    """A mutant's code is not where the table says; the message says where else it may be."""


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """Return the table's mutants in their order."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


# -------- Modules and what they define


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    path: Path
    text: str
    tree: ast.Module
    defined: dict[str, list[ast.stmt]]
    """What stands under each qualified name; several under one name for overloads and branches."""
    known: frozenset[str]
    """Names of builtins and of the module: none of them is a local variable."""


@functools.cache
def _parsed(path: Path, _changed_ns: int) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined: dict[str, list[ast.stmt]] = {}

    def collect(statements: Sequence[ast.stmt], prefix: str) -> None:
        for statement in statements:
            names: list[str] = []
            if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                names = [statement.name]
                collect(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            else:
                for body in BODIES:
                    collect(getattr(statement, body, []), prefix)
            for name in names:
                defined.setdefault(prefix + name, []).append(statement)

    collect(tree.body, "")
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    known = frozenset({*dir(builtins), *imported, *(name for name in defined if "." not in name)})
    return Module(path, text, tree, defined, known)


def modules_of(room: str, source: Path) -> list[Module]:
    """Return the modules of a room: `kapelle/ROOM.py`, or everything under `kapelle/ROOM`."""
    place = source / "kapelle" / Path(*room.split("."))
    files = [place.with_suffix(".py"), *sorted(place.rglob("*.py"))]
    return [_parsed(file, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _local_names(definition: ast.stmt) -> set[str]:
    """Names that a function (or any function in a class) binds, which may be renamed without a change of meaning."""
    if isinstance(definition, ast.ClassDef):
        return set().union(*(_local_names(inner) for inner in definition.body))
    found: set[str] = set()
    for node in ast.walk(definition):
        match node:
            case ast.arg(arg=str(name)) | ast.Name(id=str(name), ctx=ast.Store()):
                found.add(name)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                found.add(name)
            case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)) if (
                node is not definition
            ):
                found.add(name)
    if isinstance(definition, ast.Assign | ast.AnnAssign):
        targets = definition.targets if isinstance(definition, ast.Assign) else [definition.target]
        found -= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


# -------- Patterns


@dataclass
class Match:
    """How a pattern fits a piece of code."""

    may_rename: frozenset[str] = frozenset()
    """Local names of the function, when other names than the pattern's may stand there."""
    fixed: frozenset[str] = frozenset()
    """Names in a pattern that mean what they say."""
    there: dict[str, str] = field(default_factory=dict)
    """The name in the code of each name in the pattern."""
    bodies: list[ast.AST] = field(default_factory=list)
    """The statements whose body is any, in their order."""

    def fits(self, pattern: object, code: object) -> bool:
        """Return whether a tree of the pattern says the same as a tree of the code."""
        if isinstance(pattern, list):
            return (
                isinstance(code, list)
                and len(pattern) == len(code)
                and all(self.fits(one, other) for one, other in zip(pattern, code, strict=True))
            )
        if not isinstance(pattern, ast.AST):
            return type(pattern) is type(code) and pattern == code
        if type(pattern) is not type(code):
            return False
        open_body = _is_open(getattr(pattern, "body", None))
        if open_body:
            assert isinstance(code, ast.AST)
            self.bodies.append(code)
        for name, value in ast.iter_fields(pattern):
            other = getattr(code, name)
            if name in SIDE_ISSUES or (open_body and name in BODIES and (name == "body" or not value)):
                continue
            if not (self._named_alike(value, other) if _is_name(pattern, name) else self.fits(value, other)):
                return False
        return True

    def _named_alike(self, name: object, other: object) -> bool:
        if not (isinstance(name, str) and isinstance(other, str)):
            return name is other
        if name in self.there or other in self.there.values():
            return self.there.get(name) == other
        if name != other and (other not in self.may_rename or name in self.fixed):
            return False
        self.there[name] = other
        return True

    def written(self, broken: list[ast.stmt]) -> list[ast.stmt]:
        """Return the broken code, with the names of the code there and the bodies that `...` stands for."""
        bodies = iter(self.bodies)
        if _is_open(broken):
            return list(getattr(next(bodies), "body"))  # noqa: B009
        nodes = [node for statement in broken for node in _preorder(statement)]
        for node in nodes:
            for name, value in ast.iter_fields(node):
                if _is_name(node, name):
                    setattr(node, name, self.there.get(value, value))
        for node in nodes:
            if _is_open(getattr(node, "body", None)):
                whole = next(bodies)
                for name in BODIES:
                    if hasattr(node, name) and (name == "body" or not getattr(node, name)):
                        setattr(node, name, getattr(whole, name, []))
        return broken


def _preorder(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _preorder(child)


def _is_name(node: ast.AST, attribute: str) -> bool:
    match node:
        case ast.Name():
            return attribute == "id"
        case ast.arg():
            return attribute == "arg"
        case (
            ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar()
        ):
            return attribute == "name"
    return False


def _is_open(body: object) -> bool:
    match body:
        case [ast.Expr(value=ast.Constant(value=value))]:
            return value is ...
    return False


def _statements(code: str) -> list[ast.stmt]:
    """Parse statements or an expression, over several lines as it may be."""
    code = textwrap.dedent(code).strip("\n")
    try:
        return [ast.Expr(ast.parse(f"(\n{code}\n)", mode="eval").body)] if code.strip() else []
    except SyntaxError:
        return ast.parse(code).body


def _as_expression(statements: list[ast.stmt]) -> ast.expr | None:
    match statements:
        case [ast.Expr(value=value)]:
            return value
    return None


def _as_keyword(statements: list[ast.stmt]) -> ast.keyword | None:
    match statements:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
            return ast.keyword(arg=name, value=value)
    return None


# -------- Where a mutant belongs


@dataclass(frozen=True, slots=True)
class Place:
    """The one piece of code that a mutant replaces."""

    module: Module
    holder: ast.Module
    """Has the definition as its only statement, so that a header or a whole definition is found like any statement."""
    owner: ast.AST
    """The node below `holder` whose field has the code."""
    field: str
    first: int | None
    """The position in the field, when that is a list."""
    many: int
    """How many elements of the list."""
    match: Match


def _places(mutant: Mutant, module: Module, definition: ast.stmt, *, rename: bool) -> Iterator[Place]:
    original, broken = _statements(mutant.original), _statements(mutant.broken)
    expression = _as_expression(original)
    if _as_expression(broken) is None:
        expression = None  # other statements, or none, take the place of a whole statement
    keyword = _as_keyword(original) if not broken or _as_keyword(broken) else None
    local = frozenset(_local_names(definition)) if rename else frozenset()
    holder = ast.Module([definition], [])

    for owner in ast.walk(holder):
        for name, value in ast.iter_fields(owner):
            elements = value if isinstance(value, list) else [value]
            for i, element in enumerate(elements):
                pattern: object
                code: object = element
                many = 1
                if isinstance(element, ast.stmt) and expression is None:
                    many = len(original)
                    pattern, code = original, elements[i : i + many]
                elif isinstance(element, ast.keyword):
                    pattern = keyword
                elif isinstance(element, ast.expr):
                    pattern = expression
                else:
                    continue
                match = Match(local, module.known | local)
                if pattern is not None and match.fits(pattern, code):
                    yield Place(
                        module, holder, owner, name, i if isinstance(value, list) else None, many, match
                    )


def find(mutant: Mutant, source: Path) -> Place:
    """Return where a mutant belongs.

    Raises:
        MisplacedError: when that is nowhere or in several places, with the functions that have the code now.
    """
    there = [
        (module, each)
        for module in modules_of(mutant.room, source)
        for each in module.defined.get(mutant.function, [])
    ]
    problem = f"no {mutant.function} in {mutant.room}"
    for rename in (False, True) if there else ():
        places = [place for module, each in there for place in _places(mutant, module, each, rename=rename)]
        if len(places) == 1:
            return places[0]
        problem = f"the code stands {len(places)} times in {mutant.function} of {mutant.room}"
        if places:
            raise MisplacedError(problem)
    elsewhere = [
        f"{name} of {module.path.relative_to(source / 'kapelle')}"
        for module in modules_of("", source)
        for name, definitions in module.defined.items()
        for each in definitions
        if not isinstance(each, ast.ClassDef) and any(_places(mutant, module, each, rename=False))
    ]
    raise MisplacedError("; ".join([problem, *(f"found in {place}" for place in elsewhere)]))


# -------- Making the mistake


def mutated(mutant: Mutant, source: Path) -> tuple[Path, str]:
    """Return the file that a mutant changes, and the text that it has then.

    Raises:
        MisplacedError: when it is not clear where, or when `broken` names what the module does not know.
    """
    place = find(mutant, source)
    spoken, bound = _names(_statements(mutant.broken))
    own = set().union(*_names(_statements(mutant.original)))
    known = own | bound | place.module.known | set().union(*_names(place.module.tree.body))
    if unknown := sorted(spoken - known):
        raise MisplacedError(
            f"{', '.join(unknown)} in the broken code: no such name in {place.module.path.name}"
        )

    copies: dict[int, ast.AST] = {}
    holder = copy.deepcopy(place.holder, copies)
    owner = copies[id(place.owner)]
    parents = {child: parent for parent in ast.walk(holder) for child in ast.iter_child_nodes(parent)}
    broken = place.match.written(_statements(mutant.broken))
    value = getattr(owner, place.field)
    old: list[ast.AST]
    new: list[ast.AST]
    if place.first is None:
        old, new = [value], _as_node(value, broken)
        setattr(owner, place.field, new[0])
    else:
        old = value[place.first : place.first + place.many]
        new = _as_node(old[0], broken)
        value[place.first : place.first + place.many] = new

    # What is written anew is the smallest part of the text that can be: an expression in an f-string has no position
    # of its own, an `elif` belongs to its `if`, a keyword argument to its call.
    lines = place.module.text.encode().splitlines(keepends=True)
    node = owner
    while not _stands_alone(old, new, parents, lines):
        old, new, node = [node], [node], parents.get(node, holder)
    return place.module.path, _spliced(lines, old, new)


def _as_node(old: ast.AST, broken: list[ast.stmt]) -> list[ast.AST]:
    """Return broken code as the kind of node that the old code is."""
    if isinstance(old, ast.stmt):
        return [*(broken or [ast.Pass()])]
    node = _as_keyword(broken) if isinstance(old, ast.keyword) else _as_expression(broken)
    return [] if node is None else [node]


def _names(statements: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the variables that statements read, and the names that they bind."""
    read: set[str] = set()
    bound: set[str] = set()
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        else:
            bound |= {
                name for field_name, name in ast.iter_fields(node) if _is_name(node, field_name) and name
            }
    return read, bound


def _stands_alone(
    old: Sequence[ast.AST], new: Sequence[ast.AST], parents: dict[ast.AST, ast.AST], lines: Sequence[bytes]
) -> bool:
    above = next(iter(old))
    if isinstance(above, ast.stmt):
        return not lines[above.lineno - 1][above.col_offset :].startswith(b"elif")
    outer: ast.AST | None = above
    while outer is not None:
        outer = parents.get(outer)
        if isinstance(outer, ast.JoinedStr):
            return False
    return all(
        isinstance(node, ast.expr)
        and not isinstance(node, ast.Starred | ast.Slice | ast.FormattedValue)
        and not (isinstance(node, ast.Tuple) and any(isinstance(each, ast.Slice) for each in node.elts))
        for node in (*old, *new)
    )


def _spliced(lines: Sequence[bytes], old: Sequence[ast.AST], new: Sequence[ast.AST]) -> str:
    first, last = old[0], old[-1]
    assert isinstance(first, ast.stmt | ast.expr)
    assert isinstance(last, ast.stmt | ast.expr)
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    start = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
    before = b"".join([*lines[: start - 1], lines[start - 1][: first.col_offset]])
    after = b"".join([lines[last.end_lineno - 1][last.end_col_offset :], *lines[last.end_lineno :]])
    written = [ast.unparse(ast.fix_missing_locations(node)) for node in new]
    if isinstance(first, ast.expr):
        text = f"({written[0]})"
    else:
        text = textwrap.indent("\n".join(written), " " * first.col_offset).lstrip(" ")
    return (before + text.encode() + after).decode()


# -------- Trying them


def complaints(mutants: Sequence[Mutant], source: Path) -> Iterator[str]:
    """Yield what is wrong with the table: code that is not there exactly once, names used twice."""
    for mutant in mutants:
        if ast.dump(ast.Module(_statements(mutant.original), [])) == ast.dump(
            ast.Module(_statements(mutant.broken), [])
        ):
            yield f"{mutant.name}: nothing is broken"
        try:
            mutated(mutant, source)
        except MisplacedError as error:
            yield f"{mutant.name}: {error}"
    for name, times in Counter(mutant.name for mutant in mutants).items():
        if times > 1:
            yield f"{name}: a name used {times} times"


def survivors(mutant: Mutant, source: Path) -> list[str]:
    """Return the named tests that stay green with the mutant in `source`, which is put right again."""
    file, text = mutated(mutant, source)
    whole = file.read_bytes()
    file.write_text(text, encoding="utf-8")
    try:
        red = failures(mutant.selected, source)
    finally:
        file.write_bytes(whole)
    return [test for test in mutant.selected if not any(_within(each, test) for each in red)]


def failures(tests: Sequence[str], source: Path) -> list[str]:
    """Return the tests that fail against the library in `source`; RuntimeError when pytest could not run them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-rf",
        "-p",
        "no:cacheprovider",
        "-m",
        SUITE,
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return FAILED.findall(done.stdout)


def _within(failed: str, test: str) -> bool:
    return failed == test or failed.startswith((f"{test}::", f"{test}["))


def in_changed_files(mutants: Sequence[Mutant], revision: str) -> list[Mutant]:
    """Return the mutants whose file, or one of whose tests' files, differs from a git revision."""

    def git(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    changed = {*git("diff", "--name-only", revision), *git("ls-files", "--others", "--exclude-standard")}
    return [
        mutant
        for mutant in mutants
        if str(find(mutant, ROOT / "src").module.path.relative_to(ROOT)) in changed
        or any(test.partition("::")[0] in changed for test in mutant.selected)
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Try the mutants and print one line for each; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be repeated")
    parser.add_argument(
        "--changed", nargs="?", const="HEAD", metavar="REV", help="those in files that differ from REV (HEAD)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="try N at a time")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    chosen = parser.parse_args(words)
    mutants = [m for m in read_mutants() if not chosen.only or m.name in chosen.only]
    if unknown := set(chosen.only or ()) - {m.name for m in mutants}:
        parser.error(f"no mutant {sorted(unknown)}; --list shows all")
    if wrong := list(complaints(mutants, ROOT / "src")):
        print(*wrong, sep="\n")  # noqa: T201
        return 1
    if chosen.changed:
        mutants = in_changed_files(mutants, chosen.changed)
    if chosen.list:
        print(*(mutant.name for mutant in mutants), sep="\n")  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sources = [Path(folder, str(i), "src") for i in range(max(1, chosen.jobs))]
        for source in sources:
            shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        return _try(mutants, sources)


def _try(mutants: Sequence[Mutant], sources: Sequence[Path]) -> int:
    """Try mutants, one at a time in each copy of the sources."""
    whole = (
        failures(sorted({test for mutant in mutants for test in mutant.selected}), sources[0])
        if mutants
        else []
    )
    if whole:
        print("red without any mutant:", *whole, sep="\n  ")  # noqa: T201
        return 1
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for source in sources:
        free.put(source)

    def verdict(mutant: Mutant) -> list[str]:
        source = free.get()
        try:
            return survivors(mutant, source)
        finally:
            free.put(source)

    alive = 0
    with ThreadPoolExecutor(len(sources)) as pool:
        for mutant, green in zip(mutants, pool.map(verdict, mutants), strict=True):
            alive += bool(green)
            print(f"{mutant.name:48} {'SURVIVES ' + ' '.join(green) if green else 'red'}", flush=True)  # noqa: T201
    print(f"{len(mutants)} mutants, {alive} survive")  # noqa: T201
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
