"""The steps of a literal test: requests to the candidate, and conditions on the returned values.

Values have built-in types, and everything here runs outside the sandbox, so that no code of the candidate takes part in a decision.
An object without an encoding stays in the candidate's process (`Stays`). A test may read parts of the object and pass it back, but
the object is never compared, because its class would decide the result.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kapelle.environments.grading.code.candidate_driver import MATCH, OF_OBJECTS
from kapelle.environments.grading.code.values import MAX_BITS, Stays, spread

MOST_ITEMS = 1_000_000
"""Maximum number of items in a sequence that is made of a candidate's values."""
FEW = 1000
"""Maximum number of items in operations that take more than linear time."""


class UnfitValue(Exception):
    """A returned value that a test cannot use: NaN, an object, or a value that is too large for the operation."""


class Later:
    """A value that depends on the candidate's replies."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class CandidateRequest(Later):
    """The result of an operation of `candidate_driver` in the candidate's process."""

    operation: str
    parts: tuple[Any, ...]
    keep: bool = False
    """Whether a later request needs the object itself, with its class."""
    of_class: bool = False
    """Whether the result is an object of a candidate's class, judged by the called name."""


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Later):
    """The result of a Python function applied to values."""

    function: Callable[..., Any]
    parts: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Lazy(Later):
    """`and` (`decisive` is False) or `or` (`decisive` is True): parts are evaluated until one decides the result."""

    decisive: bool
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One step of a test: evaluate a value, which must be true if the step `asserts` it."""

    value: Any
    asserts: bool = False


@dataclass(frozen=True, slots=True)
class LiteralTest:
    """A test program as a sequence of steps."""

    steps: tuple[CheckStep, ...]
    names_nan: bool
    """Whether the test mentions NaN; otherwise a returned NaN fails, because `not nan > 1` is true."""


class Settling:
    """Evaluates the values of one run of a test. `ask` returns the candidate's result of an operation on parts, or raises."""

    def __init__(self, ask: Callable[..., Any], names_nan: bool) -> None:
        self._ask = ask
        self._names_nan = names_nan
        self._known: dict[Later, Any] = {}
        self._objects: dict[CandidateRequest, Any] = {}

    def value(self, part: Any) -> Any:
        """Return the value of a part. Raises UnfitValue, the exceptions of `ask`, and Python's own for a value of the wrong type."""
        if not isinstance(part, Later):
            return part
        if isinstance(part, CandidateRequest) and part.keep:
            return self._ask("value", self._object(part))
        if part not in self._known:
            self._known[part] = self._evaluated(part)
        return self._known[part]

    def truth(self, part: Any) -> bool:
        """Return whether a value is true. Raises UnfitValue for an object, because its class would decide the result."""
        value = self.value(part)
        if isinstance(value, Stays) and value.nature != MATCH:
            raise UnfitValue("an object, which is neither true nor false here")
        return bool(value)

    def given(self, part: Any) -> Any:
        """Return a part as an argument for the candidate; the candidate's objects, also in containers, remain references."""
        if isinstance(part, CandidateRequest) and part.keep:
            return self._object(part)
        if isinstance(part, Apply) and isinstance(part.function, Build):
            return part.function(*map(self.given, part.parts))
        if type(part) in (tuple, list):
            return type(part)(map(self.given, part))
        if type(part) is dict:
            return {key: self.given(value) for key, value in part.items()}
        return self.value(part)

    def _object(self, request: CandidateRequest) -> Any:
        if request not in self._objects:
            parts = map(self.given, request.parts)
            self._objects[request] = self._ask(request.operation, *parts, keep=True)
        return self._objects[request]

    def _evaluated(self, part: Later) -> Any:
        if isinstance(part, CandidateRequest):
            return self._ask(part.operation, *map(self.given, part.parts))
        if isinstance(part, Lazy):
            for each in part.parts[:-1]:
                if self.truth(each) is part.decisive:
                    return self.value(each)
            return self.value(part.parts[-1])
        assert isinstance(part, Apply), "`Later` has three subclasses"
        values = [self.value(each) for each in part.parts]
        if any(isinstance(each, Stays) for each in values):
            return self._of_object(part.function, *values, **part.keywords)
        found = bounded(
            part.function, *values, **{name: self.value(each) for name, each in part.keywords.items()}
        )
        if type(found) in (float, complex) and found != found and not self._names_nan:  # noqa: PLR0124
            raise UnfitValue("NaN")
        return found

    def _of_object(self, function: Any, target: Any, *others: Any, **keywords: Any) -> Any:
        """Return the result of a function on an object, if the candidate's process can compute it without an expected value."""
        if function in IDENTITY:  # comparison with None, True, False or a type
            return function(target, *others)
        if (
            function in (is_in, is_not_in)
            and not isinstance(target, Stays)
            and others[0].nature == "iterator"
        ):
            return function(target, self._items(others[0]))
        if isinstance(target, Stays) and not any(isinstance(each, Stays) for each in others):
            name = getattr(function, "__name__", "")
            if isinstance(function, Method) and not (others or keywords or function.name.startswith("is")):
                return self._ask("call method", target, function.name, (), {})
            if function in (operator.not_, bool):
                return self.truth(target) is (function is bool)
            if function is operator.getitem:
                return self._ask("item", target, *others)
            if function is items_of and target.nature == "iterator":
                return items_of(self._ask("take", target, *others), *others)
            if function is items_of and self._ask("apply", "len", target) == others[0]:
                return [self._ask("item", target, index) for index in range(others[0])]
            if function in ITERATING:
                return bounded(function, self._items(target), *others, **keywords)
            if vars(builtins).get(name) is function and name in OF_OBJECTS and (not others or name == "next"):
                return self._ask("apply", name, target, *others)
        raise UnfitValue("an object")

    def _items(self, target: Stays) -> list[Any]:
        items = self._ask("take", target, MOST_ITEMS + 1)
        if not isinstance(items, list) or len(items) > MOST_ITEMS:
            raise UnfitValue("items that are objects, or an endless iterator")
        return items


# -------- Functions that a test may use


OF_VALUES: tuple[Any, ...] = (
    *(abs, all, any, bool, complex, dict, divmod, enumerate, float, frozenset, int, isinstance, iter, len, list, max, min, next, ord),
    *(repr, reversed, round, set, sorted, str, sum, tuple, type, math.ceil, math.fabs, math.floor, math.fsum, math.isclose),
    *(math.isfinite, math.isinf, math.isnan, math.sqrt, math.trunc, collections.Counter, collections.deque, collections.OrderedDict),
    *(copy.copy, copy.deepcopy),
)  # fmt: skip
"""Functions that may receive a candidate's values; `bounded` limits their cost."""
ITERATING: tuple[Any, ...] = (
    *(list, tuple, set, frozenset, sorted, sum, max, min, dict, all, any, collections.Counter, collections.deque),
)  # fmt: skip
"""Functions that use only an object's items."""
SURELY_PLAIN: tuple[Any, ...] = (abs, all, any, bool, float, int, isinstance, len, repr, round, str, sum, type, math.isclose)  # fmt: skip
"""Functions that never return one of the candidate's objects."""
_METHOD_NAMES = (
    "capitalize casefold conjugate copy count date decode difference encode endswith find get hex index intersection is_integer isalnum "
    "isalpha isdecimal isdigit isdisjoint islower isnumeric isoformat isspace issubset issuperset istitle isupper items join keys lower "
    "lstrip most_common partition rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase "
    "symmetric_difference time title total_seconds union upper values weekday"
)
METHODS = frozenset(_METHOD_NAMES.split())
"""Allowed methods of values: they change nothing, and their results are not much larger than the values."""


@dataclass(frozen=True, slots=True)
class Method:
    """Calls a method of a value."""

    name: str

    def __call__(self, target: Any, *args: Any, **keywords: Any) -> Any:
        """Call the method."""
        return getattr(target, self.name)(*args, **keywords)


def bounded(function: Callable[..., Any], *values: Any, **keywords: Any) -> Any:
    """Return the result of a function on values; raise UnfitValue if the candidate's values would make the call costly."""
    first, *others = values or (None,)
    if any(isinstance(each, range) and len(each) > MOST_ITEMS for each in values):
        raise UnfitValue("a range that is too long")
    hashes = function in (set, frozenset, dict, collections.Counter, collections.OrderedDict)
    for items in values if hashes or isinstance(first, (set, frozenset)) else ():
        if isinstance(items, (list, tuple)):
            is_pairs = function in (dict, collections.OrderedDict)
            spread(
                item[0] if is_pairs and isinstance(item, (list, tuple)) and item else item for item in items
            )
    if (
        function is sum
        and len(first) > FEW
        and not all(type(item) in (int, float, bool) for item in (*first, *others))
    ):
        raise UnfitValue("a long sum of what is not a number")
    if function is round and others and abs(others[0] or 0) > FEW:
        raise UnfitValue("a number of digits that is too large")
    if function == Method("join") and len(first) * len(others[0]) > MOST_ITEMS:
        raise UnfitValue("a text that is too long")
    return function(*values, **keywords)


def _times(one: Any, other: Any) -> Any:
    for sequence, count in ((one, other), (other, one)):
        if hasattr(sequence, "__len__") and isinstance(count, int) and len(sequence) * count > MOST_ITEMS:
            raise UnfitValue("a sequence that is too long")
    return one * other


def power(one: Any, other: Any, *modulus: Any) -> Any:
    """Return `pow` of numbers that are not too large."""
    whole = isinstance(one, int) and isinstance(other, int)
    if not (whole or isinstance(one, (float, complex)) or isinstance(other, (float, complex))):
        raise UnfitValue("a power of what is not a number")
    if whole and not modulus and one.bit_length() * other > MAX_BITS:
        raise UnfitValue("a number that is too large")
    return pow(one, other, *modulus)


def _shifted(one: Any, other: Any) -> Any:
    return _times(one, power(2, other))


def _modulo(one: Any, other: Any) -> Any:
    if isinstance(one, (str, bytes)):
        raise UnfitValue("a text as a format")
    return one % other


def is_in(item: Any, container: Any) -> bool:
    """Return whether a container holds an item."""
    return item in container


def is_not_in(item: Any, container: Any) -> bool:
    """Return whether a container does not hold an item."""
    return item not in container


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _times, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo, ast.Pow: power, ast.LShift: _shifted, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: is_in, ast.NotIn: is_not_in,
}  # fmt: skip
IDENTITY = (operator.is_, operator.is_not)
COMPARES = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, is_in, is_not_in)


@dataclass(frozen=True, slots=True)
class Build:
    """Makes a container of items; the items of a dictionary are alternating keys and values."""

    kind: type

    def __call__(self, *items: Any) -> Any:
        """Return the container."""
        return self.kind(zip(items[::2], items[1::2], strict=True) if self.kind is dict else items)


def items_of(values: Any, count: int) -> list[Any]:
    """Return exactly `count` items, so that a test that pairs them with known values cannot end early."""
    items = list(values)
    if len(items) != count:
        raise UnfitValue(f"{len(items)} items where the test expects {count}")
    return items


def may_be_object(part: Any) -> bool:
    """Return whether a part may be an object of the candidate."""
    if isinstance(part, Apply) and part.function not in SURELY_PLAIN:
        is_made_of_them = isinstance(part.function, Build) or part.function in OPERATORS.values()
        return any(may_be_object(each) for each in part.parts if is_made_of_them or isinstance(each, Apply))
    return isinstance(part, CandidateRequest)


def holds_object_of_class(part: Any) -> bool:
    """Return whether a part is an object of a candidate's class, or a container of such objects."""
    if isinstance(part, Apply) and isinstance(part.function, Build):
        return any(map(holds_object_of_class, part.parts))
    return isinstance(part, CandidateRequest) and part.of_class
