"""Read test programs that only call the candidate with known values and compare the results, as in `assert f([1, 2]) == 3`.

The reader evaluates the parts of a test that do not depend on the candidate: assignments, loops over known values, functions of
the test, and `check(candidate)`. The result is a list of steps (see `checks`), which request values from the candidate and
check these values outside its sandbox. A candidate can therefore influence only the values that it returns.

A test that does anything else raises NotLiteral. Examples are a test that imports an unknown module, branches on a result,
reads an argument that the candidate may have changed, compares objects, or passes the candidate a value without an encoding,
such as a function.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import datetime as dt
import decimal
import fractions
import itertools
import math
import operator
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kapelle.environments.grading.code import checks
from kapelle.environments.grading.code.candidate_driver import OF_OBJECTS
from kapelle.environments.grading.code.checks import (
    Apply,
    Build,
    CandidateRequest,
    CheckStep,
    Later,
    Lazy,
    LiteralTest,
    Method,
)
from kapelle.environments.grading.code.programs import tree_of
from kapelle.environments.grading.code.values import ValueFault, decode, encode

MOST_STEPS = 100_000
"""Maximum number of syntax nodes that are evaluated to read one test, counting every iteration of a loop."""


class NotLiteral(Exception):
    """Raised for a test that does more than call the candidate with known values; the message gives the line and the reason."""


_MODULES: dict[str, Mapping[str, Any]] = {
    "math": vars(math),
    "string": {name: value for name, value in vars(string).items() if isinstance(value, str)},
    "typing": {},
    **{
        module.__name__: {name: getattr(module, name) for name in names.split()}
        for module, names in (
            (collections, "Counter OrderedDict defaultdict deque"),
            (copy, "copy deepcopy"),
            (dt, "date datetime time timedelta"),
            (decimal, "Decimal"),
            (fractions, "Fraction"),
            (itertools, "chain combinations permutations product"),
        )
    },
}
_OF_KNOWN_VALUES = (bin, bytearray, bytes, chr, hex, oct, range, zip)
_BUILTINS: dict[str, Any] = {
    **{each.__name__: each for each in (*checks.OF_VALUES, *_OF_KNOWN_VALUES) if each.__module__ == "builtins"},
    "print": lambda *_, **__: None,
    "pow": checks.power,
    "__name__": "__main__",
}  # fmt: skip
_CHANGES = ("add", "append", "extend", "insert", "update", "remove", "discard", "pop", "sort", "reverse", "clear", "format", "replace")  # fmt: skip
"""Methods that a test may call on known values."""
_ATTRIBUTES = ("real", "imag", "numerator", "denominator", "year", "month", "day", "days")


def parsed(program: str) -> ast.Module:
    """Return the syntax tree of a test program.

    Raises SyntaxError if the program cannot be parsed.
    """
    try:
        return tree_of(program)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"it cannot be read: {error}") from None


def read_test(
    program: str, setup: str = "", candidate: Sequence[str] = (), classes: Sequence[str] | None = None
) -> LiteralTest:
    """Return the steps of a test program that runs after a setup program.

    `candidate` and `classes` have the same meaning as in `ProgramTests`. Raises NotLiteral for a test that is not literal, and
    SyntaxError for an invalid program.
    """
    reading = _TestReader(candidate, classes)
    try:
        reading.run(parsed(setup).body)
        reading.run(body := parsed(program).body)
        reading.run_tests(body)
    except (RecursionError, MemoryError):
        raise NotLiteral("it is nested too deeply") from None
    if not any(step.asserts for step in reading.steps):
        raise NotLiteral("it checks nothing that the program returns")
    return LiteralTest(tuple(reading.steps), reading.names_nan)


@dataclass(frozen=True, slots=True)
class _Own:
    """A name that the candidate defines."""

    name: str


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that a test imports; the module `solution` is the candidate."""

    name: str


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _TestReader(ast.NodeVisitor):
    def __init__(self, candidate: Sequence[str], classes: Sequence[str] | None) -> None:
        self.steps: list[CheckStep] = []
        self.names_nan = False
        self._candidate = frozenset(candidate)
        self._classes = classes
        self._scope: dict[str, Any] = {}
        self._called: set[str] = set()
        self._left = MOST_STEPS
        # Known values (keyed by identity) that were passed to the candidate by name, so that it may have changed them.
        self._given: dict[int, Any] = {}

    def visit(self, node: ast.AST) -> Any:
        """Run a statement, or return the value of an expression; this value may be a `Later`."""
        self._left -= 1
        if self._left < 0:
            _refuse(node, "it is too long")
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> NoReturn:
        """Reject syntax nodes for which this class has no visitor method."""
        _refuse(node, f"it contains a {type(node).__name__}")

    # ---- Statements

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Run the given statements in order."""
        for node in body:
            self.visit(node)

    def run_tests(self, body: Sequence[ast.stmt]) -> None:
        """Run the test functions that pytest would run, unless the test program calls them itself."""
        functions = [node for node in body if isinstance(node, ast.FunctionDef) and not node.args.args]
        for function in functions:
            if function.name.startswith("test") and function.name not in self._called:
                self._call_function(function, [], {}, function)

    def visit_Pass(self, node: ast.Pass) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            _refuse(node, "it decorates a function")
        self._scope[node.name] = node

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._scope[alias.asname or alias.name.partition(".")[0]] = _Module(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self._scope[alias.asname or alias.name] = self._member(node.module or "", alias.name)
            elif node.module in _MODULES:
                self._scope |= {name: each for name, each in _MODULES[node.module].items() if name[0] != "_"}
            elif node.module != "solution":
                _refuse(node, f"it imports `{node.module}`")

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        self._do(value)
        for target in node.targets:
            self._assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name) or type(node.op) not in checks.OPERATORS:
            _refuse(node, "it changes a part of a value")
        parts = [self.visit_Name(node.target), self._value(node.value)]
        self._assign(node.target, self._apply(node, checks.OPERATORS[type(node.op)], parts))

    def visit_Expr(self, node: ast.Expr) -> None:
        self._do(self.visit(node.value))

    def visit_Return(self, node: ast.Return) -> None:
        raise _Return(None if node.value is None else self.visit(node.value))

    def visit_Assert(self, node: ast.Assert) -> None:
        if isinstance(node.test, ast.Tuple):
            _refuse(node, "it asserts a tuple, which is always true")
        value = self._value(node.test)
        if isinstance(value, Later):
            self.steps.append(CheckStep(self._condition(node, value), asserts=True))
        elif not value:
            _refuse(node, "its assertion always fails")

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            _refuse(node, "it has a loop with `else`")
        for item in self._items(node.iter):
            self._assign(node.target, item)
            self.run(node.body)

    def visit_If(self, node: ast.If) -> None:
        self.run(node.body if self._known(node.test) else node.orelse)

    def _do(self, value: Any) -> None:
        if isinstance(value, Later):
            self.steps.append(CheckStep(value))

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._scope[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and ast.Starred not in map(type, target.elts):
            items = self._each(target, value, len(target.elts))
            for each, item in zip(target.elts, items, strict=True):
                self._assign(each, item)
        elif isinstance(target, ast.Attribute) and isinstance(owner := self._value(target.value), Later):
            self._do(self._request(target, "set attribute", owner, target.attr, value))
        else:
            _refuse(target, "it changes a part of a value")

    # ---- Names and modules

    def visit_Name(self, node: ast.Name) -> Any:
        name = node.id
        if name in self._scope:
            if id(self._scope[name]) in self._given:
                _refuse(node, f"it reads `{name}` again, although the program may have changed it")
            return self._scope[name]
        if name not in self._candidate:
            if name in _BUILTINS:
                return _BUILTINS[name]
            if name in _MODULES:  # the solution may import it
                return _Module(name)
            if self._candidate or name in vars(builtins):
                _refuse(node, f"it uses `{name}`, which is not defined")
        return _Own(name)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr.startswith("__"):
            _refuse(node, f"it uses `{node.attr}`")
        target = self.visit(node.value)
        if isinstance(target, _Module):
            return self._member(target.name, node.attr)
        target = self._fetched(target)
        if isinstance(target, CandidateRequest):
            return self._request(node, "attribute", target, node.attr)
        if node.attr not in _ATTRIBUTES:
            _refuse(node, f"it uses the attribute `{node.attr}`")
        return self._apply(node, operator.attrgetter(node.attr), [target])

    def _member(self, module: str, name: str) -> Any:
        found = _MODULES.get(module, {}).get(name, _Module(f"{module}.{name}"))
        self._notice_nan(found)
        return _Own(name) if module == "solution" else found

    def _fetched(self, value: Any) -> Any:
        """Return a request for the candidate's object if the value is a name of the candidate; otherwise return the value."""
        if not isinstance(value, _Own):
            return value
        return CandidateRequest("fetch", (value.name,), of_class=self._is_class(value.name))

    def _is_class(self, name: str) -> bool:
        return name in self._classes if self._classes is not None else name[:1].isupper() and "_" not in name

    # ---- Expressions

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise NotLiteral if the value is a function or a module."""
        value = self._fetched(self.visit(node))
        if isinstance(value, (_Module, ast.AST)):
            _refuse(node, "it uses a function or a module as a value")
        return value

    def _known(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise NotLiteral if the value depends on a result of the candidate."""
        value = self._value(node)
        if isinstance(value, Later):
            _refuse(node, "it branches on a result or iterates over a result")
        return value

    def _items(self, node: ast.expr) -> list[Any]:
        return self._each(node, self._known(node), None)

    def _each(self, node: ast.AST, value: Any, count: int | None) -> list[Any]:
        """Return the items of a value; raise NotLiteral unless there are `count` items or `count` is None."""
        if isinstance(value, Later) and count is not None:
            items = self._apply(node, checks.items_of, [value, count])
            return [Apply(operator.getitem, (items, index)) for index in range(count)]
        found = self._apply(node, lambda items: list(itertools.islice(items, MOST_STEPS)), [value])
        if count not in (None, len(found)):
            _refuse(node, "it unpacks a different number of values")
        return list(found)

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_List(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return self._apply(node, Build(kind), self._parts(node.elts))

    visit_Tuple = visit_Set = visit_List

    def visit_Dict(self, node: ast.Dict) -> Any:
        nodes = [each for pair in zip(node.keys, node.values, strict=True) for each in pair]
        if None in nodes:
            _refuse(node, "it unpacks a dictionary")
        return self._apply(node, Build(dict), self._parts(each for each in nodes if each))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        return self._apply(node, checks.OPERATORS[type(node.op)], [self._value(node.operand)])

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        one, other = self._value(node.left), self._value(node.right)
        if type(node.op) not in checks.OPERATORS or (isinstance(one, str) and isinstance(other, Later)):
            _refuse(node, "it uses `@`, or formats a result with `%`")
        return self._apply(node, checks.OPERATORS[type(node.op)], [one, other])

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        decisive = isinstance(node.op, ast.Or)
        parts: list[Any] = []
        for each in node.values:
            parts.append(self._condition(each, self._value(each)))
            if not isinstance(parts[-1], Later) and bool(parts[-1]) is decisive:
                break
        return Lazy(decisive, tuple(parts)) if any(isinstance(each, Later) for each in parts) else parts[-1]

    def _condition(self, node: ast.AST, value: Any) -> Any:
        if isinstance(value, CandidateRequest) and value.of_class:
            _refuse(node, "it uses an object as a truth value")
        return value

    def visit_Compare(self, node: ast.Compare) -> Any:
        values = [self._value(each) for each in (node.left, *node.comparators)]
        pairs = []
        for sign, one, other in zip(node.ops, values, values[1:], strict=False):
            function = checks.OPERATORS[type(sign)]
            if function in checks.IDENTITY and not any(
                isinstance(each, (bool, type, type(None))) for each in (one, other)
            ):
                _refuse(node, "it compares objects by identity")
            pairs.append(self._apply(node, function, [one, other]))
        if len(pairs) == 1:
            return pairs[0]
        return Lazy(False, tuple(pairs)) if any(isinstance(each, Later) for each in pairs) else all(pairs)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._value(node.body if self._known(node.test) else node.orelse)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        target, key = self._value(node.value), self._value(node.slice)
        if isinstance(target, CandidateRequest) and not isinstance(key, (slice, Later)):
            return self._request(node, "item", target, key)
        return self._apply(node, operator.getitem, [target, key])

    def visit_Slice(self, node: ast.Slice) -> Any:
        return slice(
            *(None if each is None else self._known(each) for each in (node.lower, node.upper, node.step))
        )

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Any:
        before = dict(self._scope)
        items = list(self._comprehended(node.generators, node.elt))
        self._scope = before
        found = self._apply(node, Build(set if isinstance(node, ast.SetComp) else list), items)
        return iter(found) if isinstance(node, ast.GeneratorExp) and isinstance(found, list) else found

    visit_GeneratorExp = visit_SetComp = visit_ListComp

    def _comprehended(self, generators: Sequence[ast.comprehension], element: ast.expr) -> Iterator[Any]:
        if not generators:
            yield self._value(element)
            return
        for item in self._items(generators[0].iter):
            self._assign(generators[0].target, item)
            if all(self._known(each) for each in generators[0].ifs):
                yield from self._comprehended(generators[1:], element)

    # ---- Calls

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.visit(node.func.value)
            if not isinstance(owner, _Module):
                return self._method_call(node, node.func.attr, self._fetched(owner))
            called = self._member(owner.name, node.func.attr)
        else:
            called = self.visit(node.func)
        if isinstance(called, ast.FunctionDef):
            self._called.add(called.name)
            return self._call_function(
                called, [self.visit(each) for each in node.args], self._keywords(node), node
            )
        if isinstance(called, _Own):
            request = self._request(node, "call", called.name, *self._given_arguments(node))
            request.of_class = self._is_class(called.name)
            return request
        if isinstance(called, Later):
            return self._request(node, "call object", called, *self._given_arguments(node))
        args, keywords = self._parts(node.args), self._keywords(node)
        results = [each for each in (*args, *keywords.values()) if isinstance(each, Later)]
        is_allowed = not results or called in (*checks.OF_VALUES, _BUILTINS["print"])
        if called is zip and results:
            return self._zip(node, args)
        if not is_allowed or not callable(called) or (called is isinstance and isinstance(args[-1], Later)):
            _refuse(node, f"it calls `{ast.unparse(node.func)[:60]}`{' with a result' if results else ''}")
        return self._apply(node, called, args, keywords)

    def _method_call(self, node: ast.Call, name: str, target: Any) -> Any:
        if name.startswith("__"):
            _refuse(node, f"it calls `{name}`")
        if isinstance(target, CandidateRequest) and (target.of_class or name not in checks.METHODS):
            if node.args + node.keywords and not target.of_class:
                # The result could be an object whose methods always return True: `f(3).equals(10)`.
                _refuse(node, "it calls a method of a result with known values")
            return self._request(node, "call method", target, name, *self._given_arguments(node))
        args, keywords = self._parts(node.args), self._keywords(node)
        results = [each for each in (target, *args, *keywords.values()) if isinstance(each, Later)]
        if name not in checks.METHODS and (results or name not in _CHANGES):
            _refuse(node, f"it calls the method `{name}`")
        return self._apply(node, Method(name), [target, *args], keywords)

    def _zip(self, node: ast.Call, args: Sequence[Any]) -> list[Any]:
        lengths = {len(each) for each in args if hasattr(each, "__len__")}
        if len(lengths) != 1 or node.keywords:
            _refuse(node, "it iterates over results of unknown length")
        count = lengths.pop()
        return list(zip(*(self._each(node, each, count) for each in args), strict=True))

    def _call_function(
        self, function: ast.FunctionDef, args: list[Any], keywords: dict[str, Any], node: ast.AST
    ) -> Any:
        """Run a function of the test program with the given arguments and return its result."""
        about = function.args
        names = [each.arg for each in about.args]
        defaults = dict(zip(names[::-1], map(self.visit, about.defaults[::-1]), strict=False))
        given = {**defaults, **dict(zip(names, args, strict=False)), **keywords}
        is_unusual = (
            about.vararg or about.kwarg or about.kwonlyargs or about.posonlyargs or len(args) > len(names)
        )
        if is_unusual or given.keys() != set(names):
            _refuse(node, "it calls one of its functions with unexpected arguments")
        before = self._scope
        self._scope = {**before, **given}
        try:
            self.run(function.body)
        except _Return as returned:
            return returned.value
        finally:
            self._scope = before
        return None

    def _parts(self, nodes: Iterable[ast.expr]) -> list[Any]:
        parts: list[Any] = []
        for each in nodes:
            parts += self._items(each.value) if isinstance(each, ast.Starred) else [self._value(each)]
        return parts

    def _keywords(self, node: ast.Call) -> dict[str, Any]:
        if any(each.arg is None for each in node.keywords):
            _refuse(node, "it unpacks a dictionary")
        return {str(each.arg): self._value(each.value) for each in node.keywords}

    def _given_arguments(self, node: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call of the candidate, and record the values that the candidate may change."""
        nodes = (*node.args, *(each.value for each in node.keywords))
        found = [self._scope.get(each.id) for each in nodes if isinstance(each, ast.Name)]
        # Passing the same value again is allowed.
        for value in found:
            self._given.pop(id(value), None)
        args, keywords = tuple(self._parts(node.args)), self._keywords(node)
        self._given |= {
            id(value): value for value in found if isinstance(value, (list, dict, set, bytearray))
        }
        return args, keywords

    def _request(self, node: ast.AST, operation: str, *parts: Any) -> CandidateRequest:
        try:
            return CandidateRequest(operation, _for_candidate(parts))
        except ValueFault as fault:
            _refuse(node, f"it passes {fault} to the program")

    def _apply(
        self, node: ast.AST, function: Any, parts: Sequence[Any], keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of applying a function to parts.

        The result is computed immediately if all parts are known; otherwise the function returns a `Later`.
        """
        keywords = keywords or {}
        if not any(isinstance(each, Later) for each in (*parts, *keywords.values())):
            try:
                found = checks.bounded(function, *parts, **keywords)
            except Exception as error:  # noqa: BLE001 (whatever the test's own values make Python raise)
                _refuse(node, f"it cannot be evaluated: {error}")
            self._notice_nan(found)
            return found
        objects = sum(map(checks.may_be_object, parts))
        if function in (str, repr) and isinstance(parts[0], CandidateRequest):
            # The object's class determines the string without knowing the expected value.
            return self._request(node, "apply", function.__name__, parts[0])
        if (objects > 1 and function in checks.COMPARES) or (
            objects and function in (Build(set), Build(dict), str, repr)
        ):
            _refuse(node, "it compares results that may be objects with each other")
        if any(map(checks.holds_object_of_class, parts)) and not _suits_objects(function, parts):
            _refuse(node, "it reads an object whose class the program defines")
        self.names_nan = self.names_nan or function in (math.isnan, math.isfinite)
        return Apply(function, tuple(parts), keywords)

    def _notice_nan(self, value: Any) -> None:
        self.names_nan = self.names_nan or (type(value) is float and math.isnan(value))


def _suits_objects(function: Callable[..., Any], parts: Sequence[Any]) -> bool:
    """Return whether the candidate's process can apply a function to its objects without learning the expected values."""
    if any(isinstance(each, CandidateRequest) and each.operation == "fetch" for each in parts):
        return False
    if function in (operator.eq, operator.ne):  # a function may have a name in CapWords
        return sum(isinstance(each, Later) for each in parts) == 1
    is_alone = len(parts) == 1 and isinstance(parts[0], CandidateRequest)
    is_supported = function in checks.ITERATING or getattr(function, "__name__", "") in OF_OBJECTS
    return function in (*checks.IDENTITY, Build(list), Build(tuple)) or (is_alone and is_supported)


def _for_candidate(part: Any) -> Any:
    """Return a part of a request with copies of known values and with references to results of the candidate.

    Raises ValueFault if a value has no encoding.
    """
    if isinstance(part, CandidateRequest):
        part.keep = True
    elif isinstance(part, Apply) and isinstance(part.function, Build):
        _for_candidate(part.parts)
    elif isinstance(part, dict) and _has_later(part):
        return {key: _for_candidate(each) for key, each in part.items()}
    elif type(part) in (list, tuple) and _has_later(part):
        return type(part)(map(_for_candidate, part))
    elif not isinstance(part, Later):
        return decode(encode(part))
    return part


def _has_later(part: Any) -> bool:
    if isinstance(part, (list, tuple, dict)):
        return any(map(_has_later, part.values() if isinstance(part, dict) else part))
    return isinstance(part, Later)


def _refuse(node: ast.AST, why: str) -> NoReturn:
    raise NotLiteral(f"line {getattr(node, 'lineno', 1)}: {why}")
