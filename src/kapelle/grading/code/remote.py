"""What stands for the candidate's objects inside the tests' sandbox; using one sends a message and waits.

Nothing of the candidate's decides a comparison here. An object of its own equals itself, as the tests hold it or passed it,
and all other comparisons of it, or of NaN, raise, so that neither `==` nor `!=` can be passed by what is no value. An
operator of its own that was given a value gives an object that is no number (`f(3) - 9.0`). What a candidate raises cannot
end an iteration of the tests. Only a call whose result nobody uses changes its arguments: `f(x) == expected(x)` does not.

Standard library and the encoding only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import builtins
import opcode
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, BinaryIO, NoReturn, Self

from kapelle.grading.code.values import Callback, Coroutine, Reference, decode, encode, said_by


class _Channel:
    """The two ends of the conversation with the referee."""

    requests: BinaryIO
    replies: BinaryIO
    functions: list[Callable[..., Any]]
    """The tests' own functions that were passed to the candidate."""
    exceptions: dict[str, type[Exception]]
    """The candidate's classes of exceptions that tests name."""
    heard: bool
    """Whether the candidate has said anything."""
    has_classes: bool
    """Whether the tests have made an object of a class of the candidate's."""
    sizes: dict[Any, int]
    """How many items objects said or showed that they have, until something may have changed that."""


def connect(requests: BinaryIO, replies: BinaryIO) -> None:
    """Begin a conversation."""
    _Channel.requests, _Channel.replies = requests, replies
    _Channel.functions, _Channel.exceptions, _Channel.sizes = [], {}, {}
    _Channel.heard = _Channel.has_classes = False


def heard() -> bool:
    """Return whether the candidate has said anything yet: before that, what goes wrong is the tests' fault."""
    return _Channel.heard


class CandidateError(Exception):
    """What the candidate raised, where it is no built-in exception."""


def exception_class(name: str) -> type[Exception]:
    """Return the class by which tests catch an exception of the candidate's."""
    return _Channel.exceptions.setdefault(name, type(name, (CandidateError,), {}))


def is_candidates(error: BaseException) -> bool:
    """Return whether the candidate raised it, and not the tests."""
    return getattr(error, "raised_by_candidate", False) is True


class Remote:
    """An object, function or name of the candidate's."""

    __slots__ = ("_constructed", "_met_value", "_passed", "_target")

    def __init__(self, target: Any, *, met_value: bool = False) -> None:
        object.__setattr__(self, "_target", target)
        # Whether the tests made it by calling a class, gave it to the candidate, and whether an operator made it of a value.
        object.__setattr__(self, "_constructed", False)
        object.__setattr__(self, "_passed", False)
        object.__setattr__(self, "_met_value", met_value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (a call, passed on)
        given = [_outside(a) for a in args], {k: _outside(v) for k, v in kwargs.items()}
        value, changed = _ask("call", self._target, *given)
        if value is None and changed and _is_unused(sys._getframe(1)):  # noqa: SLF001 (its caller)
            for place, new in changed.items():
                _change(args[place] if isinstance(place, int) else kwargs[place], _here(new))
        if isinstance(value, Remote) and isinstance(self._target, str) and self._target[:1].isupper():
            object.__setattr__(value, "_constructed", True)
            _Channel.has_classes = True
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("get", self._target, name)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self._target, name, _outside(value))

    def __bool__(self) -> bool:
        # Only where the tests make objects of its classes (`while node:`): elsewhere a value belongs.
        asked = _Channel.has_classes and not self._met_value
        truth = _ask("truth", self._target)[0] if asked else None
        if type(truth) is not bool:
            raise TypeError("the candidate returned an object of its own where a value belongs")
        return truth

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            if self is other:
                return True
            # Of two objects that the candidate names one after the other, only its word says that they are one.
            if self._passed or other._passed:
                return bool(_target(self) == _target(other))
            raise TypeError("two objects of the candidate's were compared with each other")
        if other is None:
            return False
        raise TypeError("the candidate's own object was compared with a value")

    def __hash__(self) -> int:
        return hash(_target(self))

    def __iter__(self) -> Iterator[Any]:
        _need_own(self)
        iterator = _ask("iterate", self._target)[0]
        if not isinstance(iterator, Remote):
            raise TypeError("the candidate's object is not iterable")
        count, size = 1, 0
        while True:
            items = _ask("take", _target(iterator), count)[0]
            size += len(items)
            if len(items) < count:
                _agree(self, size)
            yield from items
            if len(items) < count:
                return
            count = min(2 * count, 256)

    def __next__(self) -> Any:
        items = _ask("take", self._target, 1)[0]
        if not items and not _awaits_end(sys._getframe(1)):  # noqa: SLF001 (its caller)
            raise CandidateError("the candidate's iterator has no more items")
        if not items:
            raise StopIteration
        return items[0]

    def __len__(self) -> int:
        _need_own(self)
        size = _ask("operate", self._target, "__len__", [])[0]
        if type(size) is int:
            _agree(self, size)
        return size  # type: ignore[no-any-return]

    def __contains__(self, item: object) -> bool:
        _need_own(self)
        if self._constructed:
            return bool(_ask("operate", self._target, "__contains__", [_outside(item)])[0])
        # What a function returns does not learn what is looked for in it.
        return any(each == item for each in self)

    def __instancecheck__(self, instance: object) -> bool:
        raise TypeError("whether an object is of the candidate's class is not known here")


_MADE_OF_A_VALUE = "an operator of the candidate's was given a value, and made another of it"


def _need_own(remote: Remote) -> None:
    """Raise TypeError for what an operator made of a value: `len(f(3) - {1, 2})` could be anything."""
    if object.__getattribute__(remote, "_met_value"):
        raise TypeError(_MADE_OF_A_VALUE)


def _agree(remote: Remote, size: int) -> None:
    """Raise TypeError where an object said or showed another number of items before, and nothing was called since."""
    if _Channel.sizes.setdefault(_target(remote), size) != size:
        raise TypeError("the candidate's object does not have as many items as it says")


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *args: Any) -> Any:
        met_value = any(
            object.__getattribute__(each, "_met_value") if isinstance(each, Remote) else name in _ARITHMETIC
            for each in (self, *args)
        )
        value = _ask("operate", _target(self), name, [_outside(each) for each in args])[0]
        if met_value and name in (*_ARITHMETIC, *_CONVERSIONS):
            if not isinstance(value, Remote) or name in _CONVERSIONS:
                raise TypeError(_MADE_OF_A_VALUE)
            return Remote(_target(value), met_value=True)
        return value

    return operate


_ARITHMETIC = tuple(
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    for side in ("", "r")
)
_CONVERSIONS = ("__int__", "__float__", "__abs__", "__str__", "__repr__", "__neg__")
for _name in (
    *_ARITHMETIC,
    *_CONVERSIONS,
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__enter__",
    "__exit__",
):
    setattr(Remote, _name, _operation(_name))

_UNUSED = re.compile(r"POP_TOP|POP_JUMP_\w*IF_(?:NOT_)?NONE")
_CACHE = opcode.opmap.get("CACHE", 0)


def _is_unused(caller: FrameType) -> bool:
    """Return whether the result of the call that a frame waits for is dropped, or only asked whether it is None."""
    code, place = caller.f_code.co_code, caller.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    return _UNUSED.fullmatch(opcode.opname[code[place]]) is not None


def _awaits_end(caller: FrameType) -> bool:
    """Return whether a frame that calls `next` may see the end: it names StopIteration, has a default, or is no function.

    In a function that `map` calls, the end would end what the tests iterate over.
    """
    code = caller.f_code
    alone = (
        opcode.opname[code.co_code[caller.f_lasti]] in ("CALL", "PRECALL")
        and code.co_code[caller.f_lasti + 1] == 1
    )
    return not alone or code.co_name == "<module>" or "StopIteration" in code.co_names


class NoNumber(float):
    """NaN of the candidate's: `math.isnan` knows it, it is not itself, and no comparison with a number is passed by it."""

    def __new__(cls) -> Self:  # noqa: D102 (there is one NaN)
        return float.__new__(cls, "nan")

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self._unequal(other, False)

    def __ne__(self, other: object) -> bool:
        return self._unequal(other, True)

    def _unequal(self, other: object, verdict: bool) -> bool:
        if not isinstance(other, NoNumber):
            self._refuse()
        return verdict

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the candidate returned NaN where a number belongs")

    __lt__ = __le__ = __gt__ = __ge__ = _refuse


for _name in (*_ARITHMETIC, "__neg__", "__pos__", "__abs__", "__round__"):
    setattr(NoNumber, _name, lambda *_: NoNumber())


def _target(value: Remote) -> Any:
    return object.__getattribute__(value, "_target")


def _outside(value: Any) -> Any:
    """Return a value with the targets of the remote objects in it, and numbers for the tests' own functions."""
    if isinstance(value, Remote):
        object.__setattr__(value, "_passed", True)
        return _target(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_outside(item) for item in value)
    if isinstance(value, dict):
        return {_outside(key): _outside(item) for key, item in value.items()}
    if callable(value) and not isinstance(value, type):
        _Channel.functions.append(value)
        return Callback(len(_Channel.functions) - 1)
    return value


def _here(value: Any) -> Any:
    """Return a decoded value with a remote object for each reference in it."""
    if isinstance(value, Coroutine):
        return _awaited(Reference(value.number))
    if isinstance(value, Reference):
        return Remote(value)
    if isinstance(value, (float, complex)) and value != value:  # noqa: PLR0124 (NaN alone is not itself)
        return NoNumber()
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_here(item) for item in value)
    if isinstance(value, dict):
        return {_here(key): _here(item) for key, item in value.items()}
    return value


async def _awaited(target: Reference) -> Any:
    return _ask("await", target)[0]


def _change(old: Any, new: Any) -> None:
    """Give a container the content of another one, in place, as deep as both go alike."""
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            old[:] = new
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            if type(before) is type(after) and isinstance(before, (list, dict, set)):
                _change(before, after)
            else:
                old[place] = after
    elif isinstance(old, dict) and isinstance(new, dict):
        kept = dict(old)
        old.clear()
        old.update(new)
        for key in kept.keys() & new.keys():
            if type(kept[key]) is type(new[key]) and isinstance(kept[key], (list, dict, set)):
                _change(kept[key], new[key])
                old[key] = kept[key]
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new


def say(*message: Any) -> None:
    """Send a message to the referee."""
    _Channel.requests.write(encode(message).encode() + b"\n")
    _Channel.requests.flush()


def _ask(*message: Any) -> tuple[Any, dict[Any, Any]]:
    """Return the candidate's value, and the arguments that it changed; its calls of the tests' functions are made meanwhile."""
    say(*message)
    if message[0] in ("call", "set") or message[2:3] in [("__setitem__",), ("__delitem__",)]:
        _Channel.sizes.clear()
    while True:
        kind, *rest = decode(_Channel.replies.readline())
        _Channel.heard = True
        if kind == "value":
            return _here(rest[0]), rest[1]
        if kind == "error":
            _raise(*rest)
        function, args, kwargs = rest
        try:
            value = _Channel.functions[function.number](
                *map(_here, args), **{name: _here(item) for name, item in kwargs.items()}
            )
        except Exception as error:  # noqa: BLE001 (the candidate called it, and gets what it raises)
            say("raised", type(error).__name__, said_by(error))
        else:
            say("returned", _outside(value))


_ENDS_ITERATIONS = (StopIteration, StopAsyncIteration)


def _raise(names: tuple[str, ...], text: str) -> NoReturn:
    """Raise what the candidate raised: by its own class where tests name it, and by the built-in one that it derives from."""
    found = [getattr(builtins, name, None) for name in names]
    builtin = next(
        (kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception
    )
    if issubclass(builtin, (*_ENDS_ITERATIONS, AssertionError)) or builtin is Exception:
        builtin = CandidateError
    own = next((_Channel.exceptions[name] for name in names if name in _Channel.exceptions), CandidateError)
    ours = own is CandidateError and builtin is CandidateError
    shown = f"{', '.join(names[:1])}: {text}" if ours else text
    raised: Any
    try:
        kind: Any = own if builtin is CandidateError else builtin
        if own is not CandidateError and builtin is not CandidateError:
            kind = type(names[0], (own, builtin), {})
        raised = _made(kind, shown)
    except TypeError:
        raised = CandidateError(shown)
    raised.raised_by_candidate = True
    raise raised


def _made(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except TypeError:  # a UnicodeDecodeError wants more than a text
        return kind.__new__(kind, text)
