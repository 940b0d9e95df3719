"""Stands for the candidate's objects inside the tests' sandbox: each use of one sends a message and waits for the reply.

Plain values arrive as themselves. An object that stays with the candidate never decides a comparison alone, because a candidate that
knows what is expected could say anything. It equals an object that the tests made if its class says so and if, before the tests made
that one, it showed the very attributes that tell what that one was made of. What is refused here fails the test, whatever the test catches.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Collection, Generator
from inspect import iscoroutinefunction, signature
from threading import RLock
from types import GeneratorType, TracebackType
from typing import Any, BinaryIO, NoReturn, cast

from kapelle.grading.code.values import Named, ValueFault, decode, encode, plain, said_by, type_name

MOST_FOUND = 64
"""Objects of the candidate's whose states are looked at before the tests make another one."""
MOST_SHARED = 64
"""Arguments that are watched because the candidate holds them."""


class Channel:
    """The conversation of the tests with the candidate, and what is remembered while it lasts."""

    requests: BinaryIO
    replies: BinaryIO
    heard = False
    """Whether the candidate has said anything: until then, whatever goes wrong is the tests' fault."""
    lost = ""
    """Why the candidate answers no more."""
    refused = ""
    """Why the running test fails, whatever it catches; empty if it need not."""
    checks = 0
    """How many checks the running test has reached."""
    takes_nan = False
    """Whether the running test mentions NaN, so that one that is returned may be right."""
    classes: Collection[str] = ()
    """The candidate's names that the running test uses as classes."""
    origin: frozenset[Any] = frozenset()
    """The objects of the tests' making from which the reply is made."""
    used: Any = None
    """The object that the message is about; all others in it are given to the candidate."""
    moment = 0
    """How many messages were sent."""
    looked = 0
    """The moment at which the states in `found` were last asked for."""
    objects: dict[int, tuple[Any, str]] = {}  # noqa: RUF012 (one conversation in a process)
    """The tests' own objects that were passed to the candidate, by their identity, with their kind."""
    shared: dict[str, tuple[Any, str]] = {}  # noqa: RUF012
    """Arguments that the candidate may hold, by number, with their texts as both sides know them."""
    kept: Collection[str] = ()
    """Those that it does hold."""
    frozen: dict[int, Any] = {}  # noqa: RUF012
    """Arguments that no call may change, by identity."""
    found: list[Remote] = []  # noqa: RUF012
    """The newest objects that the candidate returned, which may be answers."""
    parameters: dict[str, list[str]] = {}  # noqa: RUF012
    """The names of the parameters of its classes, by class."""
    stand_in: Callable[..., Any] | None = None
    """Answers in the candidate's place, where the tests themselves are tried."""
    texts: Collection[str] = ()
    """The text literals of the running test."""
    ahead: dict[Any, tuple[Any, ...]] = {}  # noqa: RUF012
    """Items of iterators that were taken before they were asked for, the last one first, and what came at the end."""
    sizes: dict[Any, int] = {}  # noqa: RUF012
    """How many items objects said or showed that they have; forgotten when something may have changed that."""


def begin(*, takes_nan: bool, classes: Collection[str], texts: Collection[str]) -> None:
    """Prepare for a test."""
    Channel.takes_nan, Channel.classes, Channel.texts = takes_nan, classes, texts
    Channel.refused, Channel.lost, Channel.checks = "", "", 0
    Channel.frozen, Channel.found = {}, []
    Channel.shared, Channel.kept, Channel.ahead = {}, (), {}


def say(*message: Any) -> None:
    """Send a message to the referee."""
    Channel.requests.write(encode(message).encode() + b"\n")
    Channel.requests.flush()


class CandidateError(Exception):
    """An exception that the candidate raised and that is no built-in one."""


class NotSent(ValueFault):
    """The tests gave the candidate an object of a class of their own, which cannot be sent."""


def refuse(why: str) -> NoReturn:
    """Fail the running test: what it compares is no value."""
    Channel.refused = Channel.refused or why
    raise TypeError(why)


class Remote:
    """An object, function or name of the candidate's."""

    __slots__ = (
        *("_by_tests", "_looks", "_made", "_met_value", "_nature", "_origin", "_passed", "_target", "_used"),
    )

    def __init__(self, target: str, nature: str = "", *, is_name: bool = False) -> None:
        _set = functools.partial(object.__setattr__, self)
        _set("_target", ("name" if is_name else "object", target))
        # What is known of it: "true" of functions and classes, the name of the built-in type that it extends.
        _set("_nature", nature)
        # When, of what, and by what name the tests made it; what it showed, and when, before they made others.
        _set("_made", None)
        _set("_looks", [])
        # Whether the tests gave it to the candidate, or used it in any other way, and whether an operator made it of a value.
        _set("_passed", False)
        _set("_used", False)
        # The objects that the tests made whose methods and operators it came from.
        _set("_origin", frozenset())
        # Whether an operator made it of a value; and whether it comes from objects of the tests by operators alone.
        _set("_met_value", False)
        _set("_by_tests", False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if self._nature == "generator":
            return GeneratorType
        return getattr(builtins, self._nature) if self._nature in _LIVE else Remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (a call, passed on)
        for given in (*args, *kwargs.values()):
            holds = isinstance(given, (list, tuple)) and not isinstance(given, Named)
            for each in given if holds else (given,):
                own = type(each).__module__ in ("setup", "test")
                if own and not (callable(each) or hasattr(each, "__next__")):
                    what = f"an object of the tests' own class {type(each).__name__}"
                    raise NotSent(f"{what} was given to the candidate")
        name = self._target[1]
        makes = self._target[0] == "name" and name[:1].isupper()
        if makes:
            _look(name)
        value = ask("call", self, tuple(map(share, args)), {key: share(each) for key, each in kwargs.items()})
        if makes and name in Channel.classes and not isinstance(value, Remote) and not shows(value, args):
            refuse(f"{name} made no object, and nothing of what it was given")
        if makes:
            _was_made(value, name, args, kwargs)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SAID:
            raise AttributeError(name)
        of_class = self._target[0] == "name" and self._target[1][:1].isupper()
        if of_class:
            _look(self._target[1])
        value = ask("get", self, name)
        if name in ("__name__", "__qualname__", "__doc__") and not isinstance(value, str):
            raise AttributeError(name)
        if of_class and isinstance(value, Remote) and value._nature != "true":  # noqa: SLF001
            # A member of an Enum is made of its name.
            _was_made(value, "", (), {"name": name})
        elif of_class and isinstance(value, Remote):
            # `Point.of(1, 2)` makes one, too.
            return functools.partial(_by_method, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self, name, share(value))

    def __delattr__(self, name: str) -> None:
        ask("delete", self, name)

    def __bool__(self) -> bool:
        if self._nature == "true":
            return True
        # Only where the tests make objects of its classes (`if node.left`): elsewhere a value belongs.
        if not Channel.parameters or self._met_value:
            refuse("the candidate returned an object of its own where a value belongs")
        return truth(self)  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        if type(other) is Remote:
            return equal(self, other)
        if self._nature in _LIVE or not self._met_value:
            content = ask("plain", self)
            if type(content) is list and len(content) == 1:
                return bool(content[0] == other)
        state: Any = None if self._met_value else ask("states", [self])[0]
        if _is_state(state) and state[1]:
            # Its class has a word on it, which is not asked for: it would hear what is expected.
            same = alike(leaves(list(state[2].values())), leaves(plain(other)))
            if same or self._made is not None:
                return same
        refuse("the candidate's own object was compared with a value")

    def __hash__(self) -> int:
        return hash(ask("hash", self))

    def __iter__(self) -> Generator[Any, Any, Any]:
        _need_own(self)
        iterator = ask("iterate", self)
        if type(iterator) is not Remote:
            raise TypeError("the candidate's object is not iterable")
        size = 0
        while True:
            try:
                # Many at once, once it is seen to be long: what is taken too early is kept for who asks next.
                item = iterator._next(1 if size < _ONE_BY_ONE else 256)  # noqa: SLF001
            except StopIteration as end:
                _agree(self, size)
                return end.value
            size += 1
            yield item

    def __next__(self) -> Any:
        return self._next(1)

    def _next(self, count: int) -> Any:
        ahead, *end = Channel.ahead.pop(self._target, ([],))
        if not ahead and not end:
            items, result = ask("take", self, count)
            ahead, end = items[::-1], [] if len(items) == count else [result]
        if not ahead:
            raise StopIteration(*end)
        item = ahead.pop()
        if ahead or end:
            Channel.ahead[self._target] = (ahead, *end)
        return item

    def __len__(self) -> int:
        _need_own(self)
        size = ask("operate", self, "__len__", ())
        if type(size) is int:
            _agree(self, size)
        return size  # type: ignore[no-any-return]

    def __contains__(self, item: object) -> bool:
        _need_own(self)
        if self._made is not None:
            return ask("contains", self, item) is True
        # What a function returns does not learn what is looked for in it.
        return any(each == item for each in self)

    def __instancecheck__(self, instance: object) -> bool:
        known = vars(instance).get("_remote") if is_sub(instance) else instance
        return type(known) is Remote and ask("is of", self, known) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return type(other) is Remote and ask("is below", self, other) is True

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            ask("operate", self, "__exit__", (None, None, None))
            return False
        left = ask("leave", self, [each.__name__ for each in type(error).__mro__[:16]], said_by(error))
        # Only what a test raises by itself may be kept from it: a failed assert never.
        return left is True and getattr(error, "said_by_the_tests", False) is True

    def __aiter__(self) -> Any:
        _need_own(self)
        return ask("operate", self, "__aiter__", ())

    async def __anext__(self) -> Any:
        items = ask("anext", self)
        if not items:
            raise StopAsyncIteration
        return items[0]

    async def __aenter__(self) -> Any:
        return ask("aoperate", self, "__aenter__", ())

    async def __aexit__(self, *_: object) -> None:
        ask("aoperate", self, "__aexit__", (None, None, None))

    def __await__(self) -> Any:
        return _awaited(self).__await__()


def truth(condition: Any) -> Any:
    """Return whether an object says that it is true, where a program goes on by it; anything else as it is."""
    if type(condition) is not Remote or condition._nature == "true":  # noqa: SLF001
        return condition
    _need_own(condition)
    said = ask("truth", condition)
    if type(said) is not bool:
        refuse("the candidate's object is neither true nor false")
    return said


_LIVE = frozenset({"list", "dict", "set", "bytearray"})
_ONE_BY_ONE = 64
_SAID = frozenset(
    {"__name__", "__qualname__", "__doc__", "__dict__", "__wrapped__", "__annotations__", "__slots__", "__module__", "__mro__"}
    | {"__match_args__", "__dataclass_fields__", "__members__", "__bases__", "__func__", "__self__", "__cause__", "__defaults__"}
)  # fmt: skip
_MADE_OF_A_VALUE = "an operator of the candidate's was given a value, and made another of it"


def _by_method(method: Remote, *args: Any, **kwargs: Any) -> Any:
    value = method(*args, **kwargs)
    _was_made(value, "", args, kwargs)
    return value


# -------- What equals an object


def _was_made(value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if type(value) is Remote:
        known = Channel.parameters.get(name, [])
        given = (
            dict(zip(known, args, strict=False))
            if not (known[:1] and known[0][:1] == "*")
            else {known[0][1:]: args}
        )
        object.__setattr__(value, "_made", (Channel.moment, {**given, **kwargs}, (*args, *kwargs.values())))
        Channel.found[:] = [each for each in Channel.found if each is not value]


def _look(name: str) -> None:
    """Ask what objects of the candidate's are, before it hears what the tests make to compare them with."""
    if name not in Channel.parameters:
        found = ask("parameters", Remote(name, is_name=True))
        Channel.parameters[name] = (
            found if type(found) is list and all(type(each) is str for each in found) else []
        )
    if Channel.found and Channel.looked < Channel.moment:
        states = ask("states", Channel.found)
        Channel.looked = Channel.moment
        for remote, state in zip(Channel.found, states if type(states) is list else (), strict=False):
            remote._looks.append((Channel.moment, state))  # noqa: SLF001


def equal(one: Remote, other: Remote) -> bool:
    """Return whether two objects of the candidate's are equal; refuse where only the word of their class says so."""
    made = [each for each in (one, other) if each._made is not None]  # noqa: SLF001
    # What the tests gave to the candidate it has, and what they made the other one from, by its methods and operators.
    known = [each for each in made if each._passed or each._target in (other if each is one else one)._origin]  # noqa: SLF001
    if one is other or (one._target == other._target and len(made) != 1):  # noqa: SLF001
        return True
    is_one = one._target == other._target  # noqa: SLF001
    said = [True, True] if is_one else ask("equal", one, other)
    if type(said) is not list or said != [True, True]:
        return False
    if len(made) == 1 and not known:
        # One is an answer and the other one what is expected: the answer must show, since before that was made, what it was
        # made of. Where it cannot tell, nothing is known.
        found = other if made[0] is one else one
        moment, by_name, given = made[0]._made  # noqa: SLF001
        before = [state for since, state in found._looks if since < moment]  # noqa: SLF001
        state = ask("states", [made[0]])[0]
        if not before or not tells(state, by_name, given):
            refuse("the candidate's object equals an expected one by its class's word alone")
        return alike(before[-1], state)
    if is_one:
        return True
    states = ask("states", [one, other]) if len(made) < 2 else None
    if states is not None and not alike(*states):
        refuse("two objects of the candidate's are equal by their class's word alone")
    return True


def tells(state: Any, by_name: dict[str, Any], given: tuple[Any, ...]) -> bool:
    """Return whether a state tells what an object was made of, so that only who knows that can show it.

    Either each argument stands in an attribute of its name; or all arguments, and nothing else, stand in the attributes in order.
    """
    if not _is_state(state) or not given:
        return False
    shown = {name.strip("_"): value for name, value in state[2].items()}
    shown |= {name.removeprefix(f"_{state[0]}__"): value for name, value in state[2].items()}
    if by_name and all(
        name in shown and alike(shown[name], _shown(value)) for name, value in by_name.items()
    ):
        return bool(leaves(list(by_name.values())))
    # What is None or empty may be left out, or stand for what was.
    own, wanted = (
        [each for each in leaves(values) if not (each is None or each == "")]
        for values in (list(state[2].values()), _shown(given))
    )
    return bool(wanted) and alike(own, wanted)


def _shown(value: Any) -> Any:
    """Return an argument as a state shows it: objects by their states, tuples as lists."""
    if type(value) is Remote:
        return ask("states", [value])[0]
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_state(state: Any) -> bool:
    return (
        type(state) is list
        and list(map(type, state)) == [str, bool, dict]
        and all(type(name) is str for name in state[2])
    )


def shows(state: Any, given: Any) -> bool:
    """Return whether all values stand in a state, in this order."""
    shown = iter(leaves(state))
    return all(any(alike(leaf, each) for each in shown) for leaf in leaves(given))


def alike(one: Any, other: Any) -> bool:
    """Return whether two values are the same, types included; nothing is like an object of the candidate's."""
    left, right = leaves(one), leaves(other)
    same_shape = len(left) == len(right) and (isinstance(one, (list, tuple)) or type(one) is type(other))
    return (
        same_shape
        and all(type(a) is type(b) is not Remote and a == b for a, b in zip(left, right, strict=True))
        and (not isinstance(one, dict) or [*one] == [*other])
    )


def leaves(value: Any) -> list[Any]:
    """Return the values that stand in lists, tuples and dictionaries, in their order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _ordering(name: str, opposite: str) -> Callable[[Remote, object], Any]:
    def compare(self: Remote, other: object) -> Any:
        if type(other) is not Remote:
            return NotImplemented
        said = [
            ask("operate", one, each, (two,))
            for one, each, two in ((self, name, other), (other, opposite, self))
        ]
        if not all(type(each) is bool for each in said[:1]):
            return NotImplemented
        # What is below another one is not above it.
        if said[0] and said[1] is True:
            refuse("the order of the candidate's objects is none")
        return said[0]

    return compare


# A docstring of the class would hide that of a function which the candidate has made.
Remote.__doc__ = property(lambda self: self.__getattr__("__doc__"))  # type: ignore[assignment]

for _name, _opposite in (
    ("__lt__", "__lt__"),
    ("__le__", "__lt__"),
    ("__gt__", "__gt__"),
    ("__ge__", "__gt__"),
):
    setattr(Remote, _name, _ordering(_name, _opposite))


# -------- Operators


def _need_own(remote: Remote) -> None:
    """Refuse an object that an operator made of a value: `len(f(3) - {1, 2})` could be anything."""
    if remote._met_value:  # noqa: SLF001
        refuse(_MADE_OF_A_VALUE)


def _agree(remote: Remote, size: int) -> None:
    """Refuse an object that said or showed another number of items before, unless something may have changed it since."""
    if Channel.sizes.setdefault(remote._target, size) != size:  # noqa: SLF001
        refuse("the candidate's object does not have as many items as it says")


_ARITHMETIC = tuple(
    f"__{side}{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
    for side in ("", "r", "i")
)
_CONVERSIONS = (
    *("__int__", "__float__", "__complex__", "__index__", "__abs__", "__str__", "__repr__", "__bytes__"),
    *("__neg__", "__pos__", "__invert__", "__round__", "__format__", "__trunc__", "__floor__", "__ceil__"),
)


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *args: Any) -> Any:
        if self._nature in _LIVE and name in _ARITHMETIC and not all(type(each) is Remote for each in args):
            content = ask("plain", self)[0]
            return getattr(content, name, lambda *_: NotImplemented)(*args)
        objects = [each for each in (self, *args) if type(each) is Remote]
        # What the tests make, and give to its class's operators, is what they test: no answer is in it.
        by_tests = all(each._by_tests or each._made is not None for each in objects)  # noqa: SLF001
        met_value = any(
            each._met_value if type(each) is Remote else name in _ARITHMETIC and not by_tests  # noqa: SLF001
            for each in (self, *args)
        )
        value = ask("operate", self, name, tuple(map(share, args)))
        if by_tests and type(value) is Remote:
            object.__setattr__(value, "_by_tests", True)
        if met_value and name in (*_ARITHMETIC, *_CONVERSIONS):
            if value is NotImplemented:
                return value
            if type(value) is not Remote or name in _CONVERSIONS:
                refuse(_MADE_OF_A_VALUE)
            object.__setattr__(value, "_met_value", True)
        return value

    return operate


for _name in (
    *_ARITHMETIC,
    *_CONVERSIONS,
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__enter__",
    "__reversed__",
):
    setattr(Remote, _name, _operation(_name))


# -------- Immutable values of the candidate's classes


def is_sub(value: object) -> bool:
    """Return whether a value is one of a class of the candidate's that derives from a built-in immutable type."""
    return isinstance(getattr(type(value), "_is_sub", None), frozenset)


@functools.lru_cache(maxsize=512)
def _sub_class(base: Any, overridden: frozenset[str]) -> Any:
    """Return a class of values that are those of a built-in type, and whose methods are asked of the candidate."""

    def forwarded(name: str) -> Callable[..., Any]:
        own = getattr(base, name, None)

        def method(self: Any, *args: Any) -> Any:
            # Beside a plain value, one of the candidate's own class counts as the built-in value that it is.
            theirs = name in ("__str__", "__repr__", "__format__", "__neg__", "__abs__") or all(
                map(is_sub, args)
            )
            if not theirs and own is not None:
                return own(self, *args)
            value = ask("operate", self._remote, name, args)
            return own(self, *args) if value is NotImplemented and own is not None else value

        return method

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("__") or name in ("_remote", "_fields"):
            raise AttributeError(name)
        return getattr(self._remote, name)

    body: dict[str, Any] = {name: forwarded(name) for name in overridden if name in _FORWARDED_BY_VALUE}
    body["__hash__"] = base.__hash__
    return type(base.__name__, (base,), {**body, "__getattr__": __getattr__, "_is_sub": overridden})


_FORWARDED_BY_VALUE = frozenset(
    {"__str__", "__repr__", "__format__", "__neg__", "__abs__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__"}
    | {"__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__"}
    | {"__lt__", "__le__", "__gt__", "__ge__"}
)  # fmt: skip


def _sub(base: Any, number: str, overridden: str) -> Any:
    base_type: Any = type(base)
    kind: Any = _sub_class(base_type, frozenset(overridden.split()))
    if isinstance(base, Named):
        made = kind.__new__(kind, base._called(), base._fields, tuple(base))  # noqa: SLF001
    else:
        made = kind.__new__(kind, base)
    made._remote = Remote(number)  # noqa: SLF001
    return made


# -------- Messages


def _refer(value: Any) -> tuple[Any, ...] | None:
    """Return how an object is written for the candidate: its own by number, the tests' as a stand-in; None for a value."""
    if type(value) is Remote:
        object.__setattr__(value, "_passed" if value is not Channel.used else "_used", True)
        return value._target  # type: ignore[no-any-return]  # noqa: SLF001
    if isinstance(value, _Shared):
        return "shared", value.number, value.value
    if is_sub(value):
        return _refer(value._remote)  # noqa: SLF001
    if isinstance(value, type):
        if type_name(value):
            return None
        bases = [each.__name__ for each in value.__mro__ if vars(builtins).get(each.__name__) is each]
        return _theirs(value, "error", bases) if issubclass(value, BaseException) else _theirs(value, "class")
    if isinstance(value, (functools.partial, *_ROUTINES)) or (
        callable(value) and not isinstance(value, _PLAIN_KINDS)
    ):
        annotations = getattr(value, "__annotations__", None) or {}
        told = {
            name: each for name, each in annotations.items() if isinstance(each, type) and type_name(each)
        }
        about = getattr(value, "__doc__", None), told, _parameters(value)
        return _theirs(value, "async function" if iscoroutinefunction(value) else "function", *about)
    if type(value).__module__ == "_io":
        return _theirs(value, "object")
    if hasattr(value, "__next__"):
        return _theirs(value, "iterator")
    if type(value).__module__ in ("setup", "test") and id(value) in Channel.objects:
        return _theirs(value, "object")
    return None


_ROUTINES = (type(len), type(lambda: 0))


_PLAIN_KINDS = (str, int, float, complex, bytes, bytearray, list, tuple, set, frozenset, dict)


def _theirs(value: Any, kind: str, *about: Any) -> tuple[Any, ...]:
    Channel.objects[id(value)] = (value, kind)
    name = getattr(value, "__name__", type(value).__name__)
    return "theirs", str(id(value)), kind, name if type(name) is str else "", *about


def _parameters(function: Any) -> list[Any]:
    """Return the parameters of a function of the tests', for decorators that look at them."""
    if not hasattr(function, "__code__"):
        return []
    try:
        found = signature(function).parameters.values()
        made = [
            (each.name, int(each.kind), [] if each.default is each.empty else [each.default])
            for each in found
        ]
        encode(made)
    except (ValueError, TypeError, ValueFault):
        return []
    return made


class _Shared:
    """An argument that a call may change in place, with its number."""

    __slots__ = ("number", "value")

    def __init__(self, number: str, value: Any) -> None:
        self.number, self.value = number, value


def share(value: Any) -> Any:
    """Return an argument as it is sent: what can be changed in place gets a number, so that it is the same one at the next call."""
    if type(value) not in (list, dict, set, bytearray) or id(value) in Channel.frozen:
        return value
    Channel.shared[str(id(value))] = (value, "")
    return _Shared(str(id(value)), value)


def change(old: Any, new: Any) -> None:
    """Give a container the content of another one, in place, as deep as both have the same types; frozen ones stay."""
    if id(old) in Channel.frozen:
        return
    if isinstance(old, list) and isinstance(new, list):
        kept = list(old)
        old[:] = [_changed(before, after) for before, after in zip(kept, new, strict=False)] + new[
            len(kept) :
        ]
    elif isinstance(old, dict) and isinstance(new, dict):
        items = {key: _changed(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new


def _changed(before: Any, after: Any) -> Any:
    if type(before) is type(after) and isinstance(before, (list, dict, set, bytearray)):
        change(before, after)
        return before
    return after


def _resolve(kind: str, *parts: Any) -> Any:
    """Return what stands here for a part of the candidate's message."""
    if kind == "object":
        number, nature = parts
        if type(number) is not str or not number.isdigit() or type(nature) is not str:
            raise ValueFault("an object without a number")
        remote = Remote(number, nature)
        if nature == "coroutine":
            return _awaited(remote)
        object.__setattr__(remote, "_origin", Channel.origin)
        Channel.found.append(remote)
        del Channel.found[:-MOST_FOUND]
        return remote
    if kind == "sub":
        return _sub(*parts)
    if kind == "yours":
        return Channel.shared[parts[0]][0]
    if kind == "loan":
        number, value = parts
        if type(number) is not str or not number.startswith("c"):
            raise ValueFault("a container without a number")
        known = Channel.shared.get(number, (value, ""))[0]
        if known is not value and type(known) is type(value):
            change(known, value)
        Channel.shared[number] = (known, "")
        return known
    if kind == "theirs":
        return Channel.objects[int(parts[0])][0]
    if kind == "nan":
        if not Channel.takes_nan:
            Channel.refused = Channel.refused or "the candidate returned NaN where a number belongs"
        return parts[0]
    raise ValueFault(f"the unknown kind {kind[:20]!r}")


async def _awaited(target: Remote) -> Any:
    return ask("await", target)


def ask(*message: Any) -> Any:
    """Return the candidate's reply to a message; carries out meanwhile what it asks of the tests' objects."""
    # Threads of the tests ask one after another; the thread that waits also answers the candidate.
    with _turn:
        # It hears first what has become of the arguments that it holds.
        changed = []
        for number, (value, text) in Channel.shared.items():
            now = encode(value, _refer)
            if now != text:
                Channel.shared[number] = (value, now)
                changed.append(_Shared(number, value))
        if changed:
            _exchange("share", changed)
        try:
            return _exchange(*message)
        finally:
            held = {number: each for number, each in Channel.shared.items() if number in Channel.kept}
            Channel.shared = dict(list(held.items())[-MOST_SHARED:])


def can_be_told(value: Any) -> bool:
    """Return whether a value can be sent."""
    try:
        encode(value, _refer)
    except ValueFault:
        return False
    return True


_turn = RLock()


def _exchange(*message: Any) -> Any:
    if Channel.stand_in is not None:
        Channel.heard = True
        return Channel.stand_in(*message)
    if Channel.lost:
        raise CandidateError(Channel.lost)
    if message[0] in ("call", "set", "operate", "await", "aoperate", "take", "get"):
        if message[0] in ("call", "set") or (
            message[0] == "operate" and message[2] in ("__setitem__", "__delitem__")
        ):
            Channel.sizes.clear()
        Channel.looked = min(Channel.looked, Channel.moment)
    Channel.moment += 1
    # What comes of an object of the tests', by its methods and operators, is made of it.
    about = message[1] if len(message) > 1 else None
    origin: frozenset[Any] = frozenset()
    if type(about) is Remote:
        origin = about._origin | ({about._target} if about._made is not None else frozenset())  # noqa: SLF001
    if message[0] in ("equal", "states"):
        known = [(each, each._passed) for each in (message[1] if message[0] == "states" else message[1:])]  # noqa: SLF001
    else:
        known, Channel.used = [], about
    _send(encode(message, _refer))
    Channel.used = None
    for each, passed in known:
        object.__setattr__(each, "_passed", passed)
    while True:
        line = Channel.replies.readline()
        Channel.heard = True
        if line.startswith(b"!") or not line:
            _lose(decode(line[1:]) if line else "")
        Channel.origin = origin
        try:
            reply = decode(line, _resolve)
            if type(reply) is not tuple or not reply:
                raise ValueFault("something that is not a reply")
            kind, *rest = reply
            if kind == "callback":
                operation, number, args, kwargs = rest
                _answer(operation, number, args, kwargs)
                continue
            content, changes, kept, printed = rest
            if kind not in ("value", "error") or type(changes) is not dict or type(kept) is not list:
                raise ValueFault("something that is not a reply")
        except (ValueFault, ValueError, TypeError, KeyError, IndexError, OverflowError) as fault:
            _lose(f"it sent {fault}")
        if type(printed) is str and printed:
            sys.stdout.write(printed)
        Channel.kept = kept
        for number, new in changes.items():
            if number in Channel.shared:
                old = Channel.shared[number][0]
                change(old, new)
                Channel.shared[number] = (old, encode(old, _refer))
        for number in kept:
            value, text = Channel.shared.get(number, (None, "known"))
            if not text:
                Channel.shared[number] = (value, encode(value, _refer))
        if Channel.refused and not Channel.takes_nan and "NaN" in Channel.refused:
            raise TypeError(Channel.refused)
        if kind == "error":
            raise made_error(content)
        return content


def _send(text: str) -> None:
    Channel.requests.write(b"?" + text.encode() + b"\n")
    Channel.requests.flush()


def _lose(why: Any) -> NoReturn:
    Channel.lost = f"the candidate did not answer: {why}"
    raise CandidateError(Channel.lost)


def _answer(operation: Any, number: Any, args: Any, kwargs: Any) -> None:
    """Use an object of the tests as the candidate asks, and send what came of it."""
    target, kind = Channel.objects[int(number)]
    try:
        if operation == "call" and kind in ("function", "class", "error", "async function"):
            value = target(*args, **kwargs)
            if kind == "async function":
                # Tests know an exception's class by whether its module is loaded: none is loaded before it is needed.
                import asyncio
                from concurrent.futures import ThreadPoolExecutor

                # In a thread: a loop of the tests' may be running in this one.
                with ThreadPoolExecutor(1) as thread:
                    value = thread.submit(asyncio.run, value).result()
            if type(value).__module__ in ("setup", "test"):
                Channel.objects[id(value)] = (value, "object")
        elif operation in ("next", "send", "close") and kind == "iterator":
            try:
                value = [next(target) if operation == "next" else getattr(target, operation)(*args)]
            except StopIteration:
                value = []
        elif operation in ("get", "set") and kind in ("object", "class") and not args[0].startswith("_"):
            value = {"get": getattr, "set": setattr}[operation](target, *args)
        else:
            raise AttributeError(f"no {operation} of a {kind} of the tests'")
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the candidate asked, and gets what it raises)
        _send(_raised(error))
        return
    try:
        text = encode(("returned", value), _refer)
    except ValueFault as fault:
        text = _raised(TypeError(f"{fault}"))
    _send(text)


def _raised(error: BaseException) -> str:
    return encode(("raised", [each.__name__ for each in type(error).__mro__[:16]], said_by(error)))


# -------- What the candidate raised

_known: dict[str, type[Exception]] = {}
_ENDS_ITERATIONS = (StopIteration, StopAsyncIteration)


def exception_class(name: str, above: Collection[str] = ()) -> type[Exception]:
    """Return the class by which tests catch an exception of the candidate's; it derives from the built-in one among these names."""
    if name not in _known:
        built_in = _built_in(above)
        bases = (CandidateError,) if built_in is CandidateError else (CandidateError, built_in)
        _known[name] = type(name, bases, {})
    return _known[name]


def _built_in(names: Collection[Any]) -> Any:
    found = [getattr(builtins, name, None) for name in names if type(name) is str]
    expected = (Exception, SystemExit, KeyboardInterrupt)
    kind = next((each for each in found if isinstance(each, type) and issubclass(each, expected)), Exception)
    # What the candidate raises must not end an iteration of the tests.
    return CandidateError if kind is Exception or issubclass(kind, _ENDS_ITERATIONS) else kind


def is_candidates(error: BaseException) -> bool:
    """Return whether the candidate raised it, and not the tests."""
    return getattr(error, "raised_by_candidate", False) is True


def made_error(content: Any) -> BaseException:
    """Return the exception that a reply describes: names of its classes, text, arguments, attributes, itself and its cause."""
    kinds = [tuple, str, tuple, dict]
    if type(content) is not tuple or list(map(type, content[:4])) != kinds or len(content) != len(kinds) + 2:
        _lose("it sent something that is not an error")
    names, text, args, attributes, itself, cause = content
    if not all(type(name) is str for name in (*names, *attributes)):
        _lose("it sent something that is not an error")
    # A class of the tests' own, which they gave to the candidate, or one of the standard library's that they know.
    own: list[Any] = [
        kind for kind, nature in Channel.objects.values() if nature == "error" and kind.__name__ in names[:1]
    ]
    for module in _RAISES:
        each = vars(sys.modules[module]).get(names[0]) if names and module in sys.modules else None
        if isinstance(each, type) and issubclass(each, Exception):
            own += [each] if tuple(above.__name__ for above in each.__mro__[:16]) == names else []
    if own:
        raised: Any = _made(own[0], args, text)
    else:
        built_in = _built_in(names)
        known = next((_known[name] for name in names if name in _known), None)
        bases = tuple(dict.fromkeys(each for each in (known, built_in) if each is not None))
        if known is not None and (built_in is CandidateError or issubclass(known, built_in)):
            bases = (known,)
        name = "".join(names[:1])[:100].replace("\0", "") or "CandidateError"
        try:
            kind: Any = bases[0] if len(bases) == 1 and bases[0].__name__ == name else type(name, bases, {})
        except TypeError:
            kind = CandidateError
        raised = _made(kind, args, text)
    for each, value in attributes.items():
        if each.isidentifier() and not each.startswith("_") and not hasattr(raised, each):
            setattr(raised, each, value)
    if type(itself) is Remote and vars(builtins).get(type(raised).__name__) is not type(raised) and not own:
        # Methods and properties of its class.
        type(raised).__getattr__ = _attribute
        vars(raised)["_remote"] = itself
        if said_by(raised) != text:
            type.__setattr__(type(raised), "__str__", lambda error: str(vars(error).get("_text", "")))
    if vars(builtins).get(type(raised).__name__) is not type(raised):
        vars(raised)["_text"] = text
    if isinstance(cause, BaseException):
        raised.__cause__ = cause
    vars(raised)["raised_by_candidate"] = True
    return cast("BaseException", raised)


_RAISES = (
    "dataclasses", "decimal", "json.decoder", "queue", "asyncio.exceptions", "asyncio.queues", "concurrent.futures", "statistics",
    "struct", "re", "csv", "configparser", "ipaddress", "binascii", "subprocess", "shutil", "copy", "pickle", "zoneinfo", "graphlib",
)  # fmt: skip
"""Modules whose exceptions tests expect by their own names; never those of `unittest`, which decide what a test is worth."""


def _attribute(error: Any, name: str) -> Any:
    remote = vars(error).get("_remote")
    if name.startswith("__") or remote is None:
        raise AttributeError(name)
    return getattr(remote, name)


def _made(kind: Any, args: tuple[Any, ...], text: str) -> Any:
    for given in (args, (text,)):
        try:
            found = kind(*given)
        except TypeError:  # a UnicodeDecodeError wants more than a text
            continue
        if found.args == given:
            return found
    found = kind.__new__(kind, text)
    found.args = args or (text,)
    return found
