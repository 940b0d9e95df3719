"""Interpreter for the statements and programs in `programming.toml`, which supports a small subset of Python and has a step limit.

The module `kapelle.environments.programming` needs the results of its programs and of programs with a slip, which may run forever.
The programs are never executed by Python itself; their syntax trees are traversed. A program may use statements, operators,
comprehensions, and the functions and methods listed below. Anything else is a mistake in a template and raises `AssertionError`.
Tests check that Python gives the same results.
"""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

STEPS = 200_000
"""The maximum number of nodes that a call may visit. If a call visits more nodes, TimeoutError is raised."""

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_NAMES = "abs chr enumerate int len list max min ord range repr reversed set sorted str sum zip"
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: getattr(builtins, name) for name in _NAMES.split()}
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({"isdigit", "join", "lower", "split", "upper"}),
    list: frozenset({"append", "count", "pop"}),
    dict: frozenset({"get", "items", "setdefault"}),
}


class _Returned(Exception):
    """Raised to end a call with a return value."""


def call(program: str, function: str, arguments: Sequence[Any]) -> Any:
    """Return the result of calling a function of a program with the given arguments. The function may modify the arguments.

    Raises the exceptions that Python would raise, and TimeoutError if the call takes more than `STEPS` steps.
    """
    defined = next(
        node for node in _parsed(program) if isinstance(node, ast.FunctionDef) and node.name == function
    )
    names = dict(zip((each.arg for each in defined.args.args), arguments, strict=True))
    return _returned(defined.body, names)


def run(statements: str, names: dict[str, Any]) -> Any:
    """Run statements and return the value of their `return` statement, or None if they have none.

    The statements add variables to `names`.
    """
    return _returned(_parsed(statements), names)


def _returned(statements: Sequence[ast.stmt], names: dict[str, Any]) -> Any:
    try:
        _Run().block(statements, names)
    except _Returned as returned:
        return returned.args[0]
    return None


@lru_cache(maxsize=512)
def _parsed(program: str) -> list[ast.stmt]:
    return ast.parse(program).body


class _Run:
    """A call in progress, with the number of remaining steps."""

    def __init__(self) -> None:
        self._left = STEPS

    def block(self, statements: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        """Run a list of statements in order."""
        for node in statements:
            self._statement(node, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        if isinstance(node, ast.Return):
            raise _Returned(None if node.value is None else self._value(node.value, names))
        if isinstance(node, ast.Assign):
            value = self._value(node.value, names)
            for target in node.targets:
                self._assign(target, value, names)
        elif isinstance(node, ast.AugAssign):
            assert isinstance(node.target, ast.Name), ast.unparse(node)
            old, more = names[node.target.id], self._value(node.value, names)
            names[node.target.id] = _OPERATORS[type(node.op)](old, more)
        elif isinstance(node, ast.If):
            self.block(node.body if self._value(node.test, names) else node.orelse, names)
        elif isinstance(node, ast.While):
            while self._value(node.test, names):
                self.block(node.body, names)
        elif isinstance(node, ast.For):
            for item in self._value(node.iter, names):
                self._assign(node.target, item, names)
                self.block(node.body, names)
        elif isinstance(node, ast.Expr):
            self._value(node.value, names)
        else:
            assert isinstance(node, ast.Pass), f"no statement of templates: {ast.unparse(node)}"

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Subscript):
            self._value(target.value, names)[self._value(target.slice, names)] = value
        else:
            assert isinstance(target, ast.Tuple), ast.unparse(target)
            values = list(value)
            if len(values) != len(target.elts):
                raise ValueError(f"{len(target.elts)} names for {len(values)} values")
            for each, one in zip(target.elts, values, strict=True):
                self._assign(each, one, names)

    def _value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TimeoutError(f"more than {STEPS} steps")
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id] if node.id in names else _FUNCTIONS[node.id]
            case ast.BinOp():
                return _OPERATORS[type(node.op)](
                    self._value(node.left, names), self._value(node.right, names)
                )
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](self._value(node.operand, names))
            case ast.BoolOp():
                whether = isinstance(node.op, ast.Or)
                value: Any = None
                for each in node.values:
                    value = self._value(each, names)
                    if bool(value) == whether:
                        break
                return value
            case ast.Compare():
                left = self._value(node.left, names)
                for sign, other in zip(node.ops, node.comparators, strict=True):
                    right = self._value(other, names)
                    if not _OPERATORS[type(sign)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp():
                return self._value(node.body if self._value(node.test, names) else node.orelse, names)
            case ast.List():
                return [self._value(each, names) for each in node.elts]
            case ast.Tuple():
                return tuple(self._value(each, names) for each in node.elts)
            case ast.Dict():
                assert not node.keys, "templates begin dictionaries empty"
                return {}
            case ast.Subscript():
                return self._value(node.value, names)[self._value(node.slice, names)]
            case ast.Slice():
                ends = (node.lower, node.upper, node.step)
                return slice(*(None if end is None else self._value(end, names) for end in ends))
            case ast.JoinedStr():
                return "".join(str(self._value(each, names)) for each in node.values)
            case ast.FormattedValue():
                value = self._value(node.value, names)
                return repr(value) if node.conversion == ord("r") else value
            case ast.ListComp() | ast.GeneratorExp():
                return [self._value(node.elt, own) for own in self._bound(node.generators, names)]
            case ast.DictComp():
                return {
                    self._value(node.key, own): self._value(node.value, own)
                    for own in self._bound(node.generators, names)
                }
            case ast.Lambda():
                taken = [each.arg for each in node.args.args]
                return lambda *given: self._value(
                    node.body, {**names, **dict(zip(taken, given, strict=True))}
                )
            case ast.Call():
                return self._called(node, names)
        raise AssertionError(f"no expression of templates: {ast.unparse(node)}")

    def _bound(
        self, generators: Sequence[ast.comprehension], names: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the variables in each iteration of a comprehension."""
        if not generators:
            yield names
            return
        first, *rest = generators
        for item in self._value(first.iter, names):
            own = dict(names)
            self._assign(first.target, item, own)
            if all(self._value(each, own) for each in first.ifs):
                yield from self._bound(rest, own)

    def _called(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        given: list[Any] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                given += self._value(each.value, names)
            else:
                given.append(self._value(each, names))
        more = {each.arg: self._value(each.value, names) for each in node.keywords if each.arg is not None}
        if isinstance(node.func, ast.Name):
            return self._value(node.func, names)(*given, **more)
        assert isinstance(node.func, ast.Attribute), ast.unparse(node)
        owner = self._value(node.func.value, names)
        assert node.func.attr in _METHODS.get(type(owner), ()), f"no method of templates: {ast.unparse(node)}"
        return getattr(owner, node.func.attr)(*given)
