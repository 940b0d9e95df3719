"""Changes a test program before it runs beside a candidate that it meets by message only.

Python decides some things without asking: `not (nan > 1)` is true, a loop is over when `next` raises StopIteration, an argument that was
cleared sorts to nothing. At these places a test calls a function of `rewritten_calls.py` instead, which knows what is the
candidate's. The syntax tree alone says where; frames and bytecode are not read.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Collection, Iterable
from typing import Any

_CHECKS = re.compile(r"assert|raises|fail|_?exit$|quit$", re.IGNORECASE)
"""Names of functions that check something: `pytest.raises`, `self.assertEqual`, `sys.exit`."""
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ENDS = {"StopIteration", "Exception", "BaseException"}
_DECIDE_BY_THEMSELVES = {"float", "max", "min"}
"""Built-in functions for which `rewritten_calls.py` has its own."""
PREFIX = "_kapelle_"
"""Begins the names by which tests call `rewritten_calls.py`."""


def parsed(program: str) -> ast.Module:
    """Return the tree of a program. Raises SyntaxError."""
    try:
        return ast.parse(program)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"it cannot be read: {error}") from None


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names that a program defines or imports."""
    defined = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            defined.add(node.rest)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return defined


def speaks_of_nan(tree: ast.AST, candidates: Iterable[str]) -> bool:
    """Return whether a program mentions NaN, so that one that is returned may be right."""
    for node in ast.walk(tree):
        told = getattr(node, "attr", getattr(node, "id", getattr(node, "value", "")))
        if isinstance(told, str) and told not in candidates and told.strip("+-").lower() in ("nan", "isnan"):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.NotEq, ast.Eq)):
            sides = {ast.dump(node.left), ast.dump(node.comparators[0])}
            # Nothing else differs from itself.
            if len(sides) == 1:
                return True
    return False


def classes(tree: ast.AST, own: Iterable[str]) -> frozenset[str]:
    """Return the names, capital first, whose calls a program gives to other calls of the candidate's, or compares with them."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = {
        node: node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id not in own and not hasattr(builtins, node.func.id)
    }
    found = set()
    for call, name in calls.items():
        node: ast.AST = call
        while isinstance(above.get(node), (ast.List, ast.Tuple, ast.Call, ast.Compare, ast.Dict, ast.Assign)):
            node = above[node]
            if any(part in calls and part is not call for part in ast.walk(node)):
                found.add(name)
    return frozenset(name for name in found if name[:1].isupper())


# -------- What checks


def _is_check(node: ast.AST, candidates: Collection[str]) -> bool:
    if isinstance(node, ast.Assert):
        is_false = isinstance(node.test, ast.Constant) and not node.test.value
        return is_false or not _always_holds(node.test, candidates)
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_checking_call(node))


def _is_checking_call(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return _CHECKS.match(name) is not None


def _always_holds(test: ast.expr, candidates: Collection[str]) -> bool:
    """Return whether a condition holds whatever the candidate does: it names nothing of the candidate's, or is never false."""
    if isinstance(test, (ast.Lambda, ast.GeneratorExp)):
        return True
    if isinstance(test, (ast.List, ast.Tuple, ast.Set)) and test.elts:
        return not any(isinstance(item, ast.Starred) for item in test.elts)
    if isinstance(test, ast.BoolOp):
        found = [_always_holds(value, candidates) for value in test.values]
        return any(found) if isinstance(test.op, ast.Or) else all(found)
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return all(hasattr(builtins, name) and name not in candidates for name in names)


# -------- Arguments that a call may not change


class _Frozen:
    """The names of arguments whose changes would decide what a test compares with: `f(xs) == sorted(xs)`, where `f` clears them.

    A walk in the order in which a program runs: `got` of `got = f(xs)` is a result; `sorted(xs)` behind it is worked out from what may
    have changed. A comparison, or anything else that takes both, freezes `xs`: the tests go on with what they gave.
    """

    def __init__(self, tree: ast.Module, candidates: Iterable[str]) -> None:
        self.names = set[str]()
        self._calls = {*candidates}
        self._results = set[str]()
        self._after: dict[str, set[str]] = {}
        self._given = set[str]()
        self._alias: dict[str, str] = {}
        functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
        # A parameter that is called may be the candidate's function: `check(candidate)`.
        self._calls |= {
            argument.arg
            for node in functions
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if any(
                isinstance(call, ast.Call) and getattr(call.func, "id", "") == argument.arg
                for call in ast.walk(node)
            )
        }
        for _ in functions:
            self._calls |= {
                node.name
                for node in functions
                if any(isinstance(part, ast.Name) and part.id in self._calls for part in ast.walk(node))
            }
        self._walk(tree.body)

    def _walk(self, body: Iterable[ast.AST]) -> None:
        for node in body:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self._walk(node.body)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                found = self._value(node.value) if node.value is not None else (False, set())
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    self._bind(target, node.value, found, more=isinstance(node, ast.AugAssign))
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                # Twice: what the end of a loop does to a name, its next round meets.
                for _ in range(2):
                    self._bind(node.target, node.iter, self._value(node.iter))
                    self._walk(node.body)
                self._walk(node.orelse)
            elif isinstance(node, (ast.While, ast.If)):
                for _ in range(2 if isinstance(node, ast.While) else 1):
                    self._value(node.test)
                    self._walk(node.body)
                self._walk(node.orelse)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    found = self._value(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, item.context_expr, found)
                self._walk(node.body)
            elif isinstance(node, ast.expr):
                self._value(node)
            else:
                self._walk(ast.iter_child_nodes(node))

    def _bind(
        self, target: ast.expr, value: ast.expr | None, found: tuple[bool, set[str]], *, more: bool = False
    ) -> None:
        is_result, after = found
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                if is_result:
                    self._results.add(node.id)
                elif not more:
                    self._results.discard(node.id)
                self._after[node.id] = after | (self._after.get(node.id, set()) if more else set())
                if isinstance(target, ast.Name) and isinstance(value, (ast.Name, ast.Attribute)):
                    self._alias[node.id] = self._root(_base(value))

    def _root(self, name: str) -> str:
        return self._alias.get(name, name)

    def _value(self, node: ast.AST) -> tuple[bool, set[str]]:
        """Return whether a value is a result of the candidate's, and from which given arguments it is computed."""
        if isinstance(node, ast.Name):
            root = self._root(node.id)
            given = {root, node.id} if root in self._given else set()
            return node.id in self._results, self._after.get(node.id, set()) | given
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for each in node.generators:
                self._bind(each.target, each.iter, self._value(each.iter))
            self._mixed([each.iter for each in node.generators])
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            base = _base(node.func)
            if base not in self._results and base not in self._calls:
                return self._mixed([node.func, *arguments], freezes=True)
            for part in arguments:
                self._value(part)
            self._given |= {
                self._root(each.id)
                for part in arguments
                for each in ast.walk(part)
                if isinstance(each, ast.Name)
            }
            return True, set()
        # Which object it is does not depend on what is in it.
        is_same = isinstance(node, ast.Compare) and all(
            isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops
        )
        compares = isinstance(node, (ast.Compare, ast.BinOp)) and not is_same
        return self._mixed(list(ast.iter_child_nodes(node)), freezes=compares)

    def _mixed(self, parts: list[ast.AST], *, freezes: bool = False) -> tuple[bool, set[str]]:
        found = [self._value(part) for part in parts]
        for place, (is_result, _) in enumerate(found):
            if is_result and freezes:
                for other, (_, after) in enumerate(found):
                    self.names |= after if other != place else set()
        return any(is_result for is_result, _ in found), {name for _, after in found for name in after}


def _base(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript, ast.Await)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


# -------- The moment at which an expected object is made


class _ExpectedLast(ast.NodeTransformer):
    """Makes expected objects of the candidate's classes after the answers that they are compared with.

    `P(4, 6) == add(P(1, 2), P(3, 4))` would tell the candidate what is expected before it answers. So operands change places, a name that
    stands for such an object is replaced by it, and in a table of cases each object is made when its case is compared.
    """

    def __init__(self, tree: ast.Module, candidates: Iterable[str]) -> None:
        self._classes = {name for name in candidates if name[:1].isupper()}
        self._above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        self._inlined: dict[str, ast.expr] = {}
        self._tables: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
                continue
            # Where something waits for an exception, a value stays where a name is given it.
            above: ast.AST | None = node
            while above is not None and not isinstance(
                above, (ast.Try, ast.With, ast.For, ast.While, ast.If)
            ):
                above = self._above.get(above)
            if above is not None:
                continue
            name = node.targets[0].id
            uses = [each for each in names if each.id == name and each is not node.targets[0]]
            if self._is_expected(node.value) and all(map(self._is_compared, uses)):
                self._inlined[name] = node.value
            if isinstance(node.value, (ast.List, ast.Tuple)) and len(uses) == 1:
                loop = self._above[uses[0]]
                if isinstance(loop, ast.For) and loop.iter is uses[0]:
                    self._tables[name] = node.value

    def _is_expected(self, node: ast.AST) -> bool:
        """Return whether an expression makes objects of classes, of constants alone."""
        parts = [*ast.walk(node)]
        names = {each.id for each in parts if isinstance(each, ast.Name)}
        makes = any(
            isinstance(each, ast.Call) or (isinstance(each, ast.Attribute) and each.attr.isupper())
            for each in parts
        )
        return (
            bool(names)
            and names <= self._classes
            and makes
            and all(isinstance(each, _OF_CONSTANTS) for each in parts)
        )

    def _is_compared(self, node: ast.AST) -> bool:
        above = self._above.get(node)
        if isinstance(above, ast.Compare):
            return all(isinstance(each, _EQUALITIES) for each in above.ops)
        return isinstance(above, ast.Call) and node in above.args[:2] and _is_equality(above)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in {*self._inlined, *self._tables}:
            return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._inlined[node.id]) if node.id in self._inlined else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        right = node.comparators[0]
        # What waits or binds a name stays where it stands.
        stays = any(
            isinstance(each, (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)) for each in ast.walk(right)
        )
        if (
            len(node.ops) == 1
            and isinstance(node.ops[0], _EQUALITIES)
            and self._is_expected(node.left)
            and not (stays or self._is_expected(right))
        ):
            arguments = ast.arguments([], [ast.arg("_kapelle_answer")], None, [], [], None, [])
            last = ast.Compare(node.left, node.ops, [ast.Name("_kapelle_answer", ast.Load())])
            return ast.Call(ast.Lambda(arguments, last), [right], [])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if _is_equality(node) and len(node.args) > 1 and self._is_expected(node.args[0]):
            node.args[:2] = node.args[1::-1]
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        if isinstance(node.iter, ast.Name) and node.iter.id in self._tables:
            node.iter = self._tables[node.iter.id]
        rows = node.iter.elts if isinstance(node.iter, (ast.List, ast.Tuple)) else []
        names = node.target.elts if isinstance(node.target, ast.Tuple) else []
        if (
            names
            and rows
            and all(isinstance(row, (ast.Tuple, ast.List)) and len(row.elts) == len(names) for row in rows)
        ):
            for place, name in enumerate(names):
                uses = [
                    each
                    for part in node.body
                    for each in ast.walk(part)
                    if isinstance(name, ast.Name) and getattr(each, "id", "") == name.id
                ]
                expected = [row.elts[place] for row in rows]  # type: ignore[attr-defined]
                if any(map(self._is_expected, expected)) and all(map(self._is_compared, uses)):
                    nothing = ast.arguments([], [], None, [], [], None, [])
                    for row in rows:
                        row.elts[place] = ast.Lambda(nothing, row.elts[place])  # type: ignore[attr-defined]
                    for part in node.body:
                        for above in ast.walk(part):
                            for field, value in ast.iter_fields(above):
                                if value in uses:
                                    setattr(above, field, ast.Call(value, [], []))
                                elif isinstance(value, list):
                                    value[:] = [
                                        ast.Call(use, [], []) if use in uses else use for use in value
                                    ]
        self.generic_visit(node)
        return node


_OF_CONSTANTS = (
    *(ast.Constant, ast.Name, ast.Call, ast.keyword, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Attribute, ast.UnaryOp),
    *(ast.expr_context, ast.unaryop),
)  # fmt: skip
"""What an expression is made of that makes objects of constants."""
_EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def _is_equality(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr.startswith("assert")
        and call.func.attr.endswith("Equal")
    )


# -------- The program that runs


class _Rewriter(ast.NodeTransformer):
    """Lets `rewritten_calls.py` decide where Python would not ask it; `candidates` are the names that are the candidate's."""

    def __init__(self, tree: ast.Module, candidates: Iterable[str]) -> None:
        self._candidates = {*candidates}
        self._frozen = _Frozen(tree, self._candidates).names
        self._built_in = (
            {"type", "next", "eval", "exec", *_DECIDE_BY_THEMSELVES} - self._candidates - defined_names(tree)
        )
        self._may_end = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self._candidates:
            return _helper("value", ast.Constant(node.id))
        if (
            node.id == "next"
            and node.id in self._built_in
            and isinstance(node.ctx, ast.Load)
            and not self._may_end
        ):
            return ast.Name(f"{PREFIX}next", ast.Load())
        if node.id in self._frozen and isinstance(node.ctx, ast.Load):
            return _helper("frozen", node)
        return node

    def _name(self, node: ast.expr) -> ast.expr:
        """Return a name as it is, anything else as it is visited: calls and attributes are asked of the object itself."""
        return node if isinstance(node, ast.Name) and node.id in self._candidates else self.visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        is_frozen = _base(node) in self._frozen
        node.value = self._name(node.value)
        if not isinstance(node.ctx, ast.Load):
            return node
        return (
            _helper("type", node.value)
            if node.attr == "__class__"
            else _helper("frozen", node)
            if is_frozen
            else node
        )

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        in_place = not isinstance(node.ctx, ast.Load)
        node.value = self._name(node.value) if in_place else self.visit(node.value)
        node.slice = self.visit(node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_check = _is_checking_call(node)
        ends = any(isinstance(each, ast.Name) and each.id == "StopIteration" for each in node.args)
        before, self._may_end = self._may_end, self._may_end or ends
        node.func = self._name(node.func)
        called = (
            node.func.id
            if isinstance(node.func, ast.Name) and node.func.id in {*self._built_in, "map"}
            else ""
        )
        if (called == "type" and len(node.args) == 1) or called in _DECIDE_BY_THEMSELVES:
            node.func = ast.Name(f"{PREFIX}{called}", ast.Load())
        if (
            called == "map"
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == "float"
        ):
            node.args[0] = ast.Name(f"{PREFIX}float", ast.Load())
        if called in ("eval", "exec") and node.args:
            # From inside a helper, the scopes would be its own.
            scopes = [ast.Call(ast.Name(scope, ast.Load()), [], []) for scope in ("globals", "locals")]
            node.args = [node.func, *node.args, *(scopes if len(node.args) == 1 else [])]
            node.func = ast.Name(f"{PREFIX}evaluated", ast.Load())
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        self._may_end = before
        return _helper("check", node) if is_check else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if (
            isinstance(node.ops[0], (ast.Is, ast.IsNot))
            and len(node.ops) == 1
            and not isinstance(node.comparators[0], ast.Constant)
        ):
            same = _helper("same", node.left, node.comparators[0])
            return ast.UnaryOp(ast.Not(), same) if isinstance(node.ops[0], ast.IsNot) else same
        if any(isinstance(operator, _ORDERS) for operator in node.ops):
            node.left, *node.comparators = (
                each if isinstance(each, ast.Constant) else _helper("number", each)
                for each in (node.left, *node.comparators)
            )
        return node

    def _checks(self, *body: ast.stmt) -> bool:
        """Return whether anything in these statements checks something."""
        return any(_is_check(each, self._candidates) for part in body for each in ast.walk(part))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        counts = _is_check(node, self._candidates)
        self.generic_visit(node)
        node.test = _helper("check", node.test) if counts else node.test
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        counts = self._checks(*node.body, *node.orelse)
        node.test = _truth(node.test)
        self.generic_visit(node)
        node.test = _helper("check", node.test) if counts else node.test
        return node

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.AST]:
        node.test = _truth(node.test)
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> ast.AST | list[ast.AST]:
        counts = self._checks(*node.orelse)
        self.generic_visit(node)
        return [ast.Expr(_helper("check", ast.Constant(value=True))), node] if counts else node

    visit_For = _loop

    def visit_Match(self, node: ast.Match) -> list[ast.AST]:
        self.generic_visit(node)
        return [ast.Expr(_helper("check", ast.Constant(value=True))), node]

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.MatchClass:
        if isinstance(node.cls, ast.Name) and node.cls.id in self._candidates:
            node.cls = ast.Attribute(ast.Name(f"{PREFIX}classes", ast.Load()), node.cls.id, ast.Load())
        node.patterns, node.kwd_patterns = self._visited(node.patterns), self._visited(node.kwd_patterns)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        node.test = _truth(node.test)
        self.generic_visit(node)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.ifs = [_truth(each) for each in node.ifs]
        self.generic_visit(node)
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        counts = self._checks(*node.body, *node.orelse)
        caught = {
            each.id
            for handler in node.handlers
            for each in ast.walk(handler.type or handler)
            if isinstance(each, ast.Name)
        }
        before, self._may_end = (
            self._may_end,
            bool(caught & _ENDS) or any(handler.type is None for handler in node.handlers),
        )
        node.body = self._visited(node.body)
        self._may_end = before
        for handler in node.handlers:
            handler.body = self._visited(handler.body)
            # What expects an exception checks by catching it.
            handler.body[:0] = [ast.Expr(_helper("check", ast.Constant(value=True)))] if counts else []
        node.orelse, node.finalbody = self._visited(node.orelse), self._visited(node.finalbody)
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        raised = any(
            isinstance(each, ast.Name) and each.id == "StopIteration"
            for item in node.items
            for each in ast.walk(item)
        )
        before, self._may_end = self._may_end, self._may_end or raised
        # What the tests themselves raise here, whatever the candidate does, a context manager of the candidate's may keep.
        node.body = [_own_fault(each) for each in node.body]
        self.generic_visit(node)
        self._may_end = before
        return node

    def _visited(self, body: list[Any]) -> list[Any]:
        found = (self.visit(each) for each in body)
        return [each for one in found for each in (one if isinstance(one, list) else [one])]

    def _function(self, node: ast.AST) -> ast.AST:
        before, self._may_end = self._may_end, False
        self.generic_visit(node)
        self._may_end = before
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function


def _own_fault(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.Raise) and node.exc is not None:
        node.exc = _helper("said", node.exc)
        return node
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    if isinstance(node, ast.Expr) and all(hasattr(builtins, name) for name in names):
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Raise(_helper("said"))])
        return ast.Try([node], [handler], [], [])
    return node


def _truth(test: ast.expr) -> ast.expr:
    """Return a condition in which objects are asked whether they are true: `while node:`."""
    if isinstance(test, ast.BoolOp):
        test.values = [_truth(value) for value in test.values]
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test.operand = _truth(test.operand)
    elif isinstance(test, (ast.Name, ast.Attribute, ast.Subscript, ast.NamedExpr)):
        return _helper("truth", test)
    return test


def _helper(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(f"{PREFIX}{name}", ast.Load()), list(args), [])


def rewritten(tree: ast.Module, candidates: Iterable[str]) -> ast.Module:
    """Return a program as it runs beside a candidate."""
    made = _Rewriter(tree, candidates).visit(_ExpectedLast(tree, candidates).visit(tree))
    ast.fix_missing_locations(made)
    return made  # type: ignore[no-any-return]
