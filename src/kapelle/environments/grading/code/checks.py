"""The steps of a literal test: requests to the candidate, and conditions on the returned values.

Values have built-in types, and all functions of this module run outside the sandbox, so that no code of the candidate affects a
verdict. An object without an encoding stays in the candidate's process (`Stays`). A test may read parts of such an object and
pass it back to the candidate, but the object is never compared, because its class would determine the result.
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
"""Maximum number of items in a sequence that is created from the values of a candidate."""
FEW = 1000
"""Maximum number of items in operations that take more than linear time."""


class UnfitValue(Exception):
    """Raised for a returned value that a test cannot use: NaN, an object, or a value that is too large for an operation."""


class Later:
    """A value that depends on the replies of the candidate and is therefore computed later."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class CandidateRequest(Later):
    """The result of an operation of `candidate_driver` in the candidate's process."""

    operation: str
    parts: tuple[Any, ...]
    keep: bool = False
    """Whether a later request needs the resulting object itself, including its class."""
    of_class: bool = False
    """Whether the result is an object of a class of the candidate, according to the name that is called."""


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Later):
    """The result of applying a Python function to values."""

    function: Callable[..., Any]
    parts: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Lazy(Later):
    """An `and` (`decisive` is False) or an `or` (`decisive` is True), whose parts are evaluated until one of them determines the result."""

    decisive: bool
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A step of a test that evaluates a value; if `asserts` is True, the value must be true."""

    value: Any
    asserts: bool = False


@dataclass(frozen=True, slots=True)
class LiteralTest:
    """A test program as a sequence of steps."""

    steps: tuple[CheckStep, ...]
    names_nan: bool
    """Whether the test mentions NaN. If it does not, a returned NaN fails the test, because a condition such as `not nan > 1`
    is true."""


class Settling:
    """An evaluator for the values of one run of a test.

    `ask` is a function that returns the result of an operation in the candidate's process, or raises an exception.
    """

    def __init__(self, ask: Callable[..., Any], names_nan: bool) -> None:
        self._ask = ask
        self._names_nan = names_nan
        self._known: dict[Later, Any] = {}
        self._objects: dict[CandidateRequest, Any] = {}

    def value(self, part: Any) -> Any:
        """Return the value of a part of a step.

        Raises UnfitValue, the exceptions of `ask`, and the exceptions of Python for a value of the wrong type.
        """
        if not isinstance(part, Later):
            return part
        if isinstance(part, CandidateRequest) and part.keep:
            return self._ask("value", self._object(part))
        if part not in self._known:
            self._known[part] = self._evaluated(part)
        return self._known[part]

    def truth(self, part: Any) -> bool:
        """Return whether a value is true.

        Raises UnfitValue for an object, because the class of the object would determine the result.
        """
        value = self.value(part)
        if isinstance(value, Stays) and value.nature != MATCH:
            raise UnfitValue("an object, which is neither true nor false here")
        return bool(value)

    def given(self, part: Any) -> Any:
        """Return a part as an argument for the candidate.

        Objects of the candidate, including those in containers, remain references.
        """
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
        """Return the result of applying a function to an object in the candidate's process.

        Raises UnfitValue if the candidate's process would need an expected value to compute the result.
        """
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
"""Functions that may be applied to the values of a candidate; `bounded` limits their cost."""
ITERATING: tuple[Any, ...] = (
    *(list, tuple, set, frozenset, sorted, sum, max, min, dict, all, any, collections.Counter, collections.deque),
)  # fmt: skip
"""Functions that use only the items of an object."""
SURELY_PLAIN: tuple[Any, ...] = (abs, all, any, bool, float, int, isinstance, len, repr, round, str, sum, type, math.isclose)  # fmt: skip
"""Functions that never return an object of the candidate."""
_METHOD_NAMES = (
    "capitalize casefold conjugate copy count date decode difference encode endswith find get hex index intersection is_integer isalnum "
    "isalpha isdecimal isdigit isdisjoint islower isnumeric isoformat isspace issubset issuperset istitle isupper items join keys lower "
    "lstrip most_common partition rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase "
    "symmetric_difference time title total_seconds union upper values weekday"
)
METHODS = frozenset(_METHOD_NAMES.split())
"""Names of the methods that a test may call on values. These methods do not change the value, and their results are not much
larger than the value."""


@dataclass(frozen=True, slots=True)
class Method:
    """A function that calls the method `name` of a value."""

    name: str

    def __call__(self, target: Any, *args: Any, **keywords: Any) -> Any:
        """Call the method of the given value and return the result."""
        return getattr(target, self.name)(*args, **keywords)


def bounded(function: Callable[..., Any], *values: Any, **keywords: Any) -> Any:
    """Return the result of applying a function to values; raise UnfitValue if these values would make the call too expensive."""
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
    """Return the same result as `pow`; raise UnfitValue if the numbers are too large."""
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
    """Return whether a container contains an item."""
    return item in container


def is_not_in(item: Any, container: Any) -> bool:
    """Return whether a container does not contain an item."""
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
    """A function that creates a container from items; for a dictionary, the items alternate between keys and values."""

    kind: type

    def __call__(self, *items: Any) -> Any:
        """Return a container with the given items."""
        return self.kind(zip(items[::2], items[1::2], strict=True) if self.kind is dict else items)


def items_of(values: Any, count: int) -> list[Any]:
    """Return the items of `values` as a list; raise UnfitValue unless there are exactly `count` items.

    The check ensures that a test that pairs the items with known values cannot stop early.
    """
    items = list(values)
    if len(items) != count:
        raise UnfitValue(f"{len(items)} items where the test expects {count}")
    return items


def may_be_object(part: Any) -> bool:
    """Return whether the value of a part may be an object in the candidate's process."""
    if isinstance(part, Apply) and part.function not in SURELY_PLAIN:
        is_made_of_them = isinstance(part.function, Build) or part.function in OPERATORS.values()
        return any(may_be_object(each) for each in part.parts if is_made_of_them or isinstance(each, Apply))
    return isinstance(part, CandidateRequest)


def holds_object_of_class(part: Any) -> bool:
    """Return whether the value of a part is an object of a class of the candidate, or a container of such objects."""
    if isinstance(part, Apply) and isinstance(part.function, Build):
        return any(map(holds_object_of_class, part.parts))
    return isinstance(part, CandidateRequest) and part.of_class
