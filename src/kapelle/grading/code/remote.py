"""What stands for the candidate's objects inside the tests' sandbox; using one sends a message and waits.

Nothing of the candidate's decides a comparison here. An object of its own equals itself and nothing else; comparing it, or
NaN, with a value raises, so that neither `==` nor `!=` can be passed by what is no value. What a candidate raises cannot end
an iteration of the tests.

Standard library and the encoding only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
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


def connect(requests: BinaryIO, replies: BinaryIO) -> None:
    """Begin a conversation."""
    _Channel.requests, _Channel.replies = requests, replies
    _Channel.functions, _Channel.exceptions = [], {}


class CandidateError(Exception):
    """What the candidate raised, where it is no built-in exception."""


def exception_class(name: str) -> type[Exception]:
    """Return the class by which tests catch an exception of the candidate's."""
    return _Channel.exceptions.setdefault(name, type(name, (CandidateError,), {}))


def is_candidates(error: BaseException) -> bool:
    """Return whether the candidate raised it, and not the tests."""
    return getattr(error, "raised_by_candidate", False) is True


class Remote:
    """An object, function or name of the candidate's. Has no truth value."""

    __slots__ = ("_target",)

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (a call, passed on)
        given = [_outside(a) for a in args], {k: _outside(v) for k, v in kwargs.items()}
        value, changed = _ask("call", self._target, *given)
        for place, new in changed.items():
            _change(args[place] if isinstance(place, int) else kwargs[place], _here(new))
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("get", self._target, name)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self._target, name, _outside(value))

    def __bool__(self) -> bool:
        raise TypeError("the candidate returned an object of its own where a value belongs")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return bool(_target(self) == _target(other))
        if other is None:
            return False
        raise TypeError("the candidate's own object was compared with a value")

    def __hash__(self) -> int:
        return hash(_target(self))

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask("iterate", self._target)[0]
        if not isinstance(iterator, Remote):
            raise TypeError("the candidate's object is not iterable")
        count = 1
        while True:
            items = _ask("take", _target(iterator), count)[0]
            yield from items
            if len(items) < count:
                return
            count = min(2 * count, 256)

    def __next__(self) -> Any:
        items = _ask("take", self._target, 1)[0]
        if not items:
            raise StopIteration
        return items[0]

    def __instancecheck__(self, instance: object) -> bool:
        raise TypeError("whether an object is of the candidate's class is not known here")


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *args: Any) -> Any:
        return _ask("operate", _target(self), name, [_outside(a) for a in args])[0]

    return operate


for _name in [
    "__len__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__str__",
    "__add__",
    "__sub__",
    "__mul__",
    "__truediv__",
    "__neg__",
    "__enter__",
    "__exit__",
    "__int__",
    "__float__",
    "__abs__",
]:
    setattr(Remote, _name, _operation(_name))


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


for _name in [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "rpow",
    "mod",
    "rmod",
    "neg",
    "pos",
    "abs",
    "round",
]:
    setattr(NoNumber, f"__{_name}__", lambda *_: NoNumber())


def _target(value: Remote) -> Any:
    return object.__getattribute__(value, "_target")


def _outside(value: Any) -> Any:
    """Return a value with the targets of the remote objects in it, and numbers for the tests' own functions."""
    if isinstance(value, Remote):
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
    if isinstance(value, float) and value != value:  # noqa: PLR0124 (NaN alone is not itself)
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
    while True:
        kind, *rest = decode(_Channel.replies.readline())
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
