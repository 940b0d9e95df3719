"""What stands for the candidate's objects inside the tests' sandbox; using one sends a message and waits.

Nothing of the candidate's decides a comparison here. An object of its own equals itself, as the tests hold it or passed it,
and all other comparisons of it, or of NaN, raise, so that neither `==` nor `!=` can be passed by what is no value. An
operator of its own that was given a value gives an object that is no number (`f(3) - 9.0`). What a candidate raises cannot
end an iteration of the tests. Only a call whose result nobody uses changes its arguments, or one behind which they are compared
with what stands there: `f(x) == expected(x)` does not.

Standard library and the encoding only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from kapelle.grading.code.arguments import change, changeable, classes
from kapelle.grading.code.channel import Channel, say
from kapelle.grading.code.collected import mapped
from kapelle.grading.code.frames import awaits_end, is_unused
from kapelle.grading.code.likeness import Made, alike, shows
from kapelle.grading.code.no_number import ARITHMETIC, NoNumber
from kapelle.grading.code.raised import CandidateError, is_said, raise_again
from kapelle.grading.code.values import Callback, Coroutine, Reference, ValueFault, decode, said_by


class Remote:
    """An object, function or name of the candidate's."""

    __slots__ = (
        "_constructed",
        "_made_at",
        "_made_of",
        "_makes",
        "_met_value",
        "_passed",
        "_state",
        "_target",
    )

    def __init__(self, target: Any, *, met_value: bool = False) -> None:
        object.__setattr__(self, "_target", target)
        # Whether the tests made it by calling a class, gave it to the candidate, and whether an operator made it of a value.
        object.__setattr__(self, "_constructed", False)
        object.__setattr__(self, "_makes", isinstance(target, str) and target[:1].isupper())
        object.__setattr__(self, "_made_of", ())
        object.__setattr__(self, "_passed", False)
        object.__setattr__(self, "_met_value", met_value)
        # With what, and when, the tests made it; else what it was, and when, before they made another one.
        object.__setattr__(self, "_made_at", Channel.moment)
        object.__setattr__(self, "_state", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (a call, passed on)
        given = [_outside(a) for a in args], {k: _outside(v) for k, v in kwargs.items()}
        _check_known((*args, *kwargs.values()))
        if self._makes:
            _look_at_recent()
        value, changed = _ask("call", self._target, *given)
        caller = sys._getframe(1)  # noqa: SLF001
        unused = value is None and bool(changed) and is_unused(caller)
        for place, new in changed.items():
            argument = args[place] if isinstance(place, int) else kwargs[place]
            if unused or _is_only_compared(argument, caller):
                change(argument, _here(new))
        if self._target in Channel.classes and not isinstance(value, Remote) and not shows(value, args):
            raise TypeError(f"{self._target} made no object, and nothing of what it was given")
        if isinstance(value, Remote) and self._makes:
            _was_made(value, (*args, *kwargs.values()), by_class=isinstance(self._target, str))
        _refresh()
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SAID:
            raise AttributeError(name)
        of_class = isinstance(self._target, str) and self._makes
        member = of_class and name.isupper()
        if member:
            _look_at_recent()
        value = _ask("get", self._target, name)[0]
        if name in _SAID and not isinstance(value, str):
            raise AttributeError(name)
        if isinstance(value, Remote) and of_class:
            if member:
                _was_made(value, (name,), by_class=True)
            # `Point.of(1, 2)` makes one, too.
            object.__setattr__(value, "_makes", not member)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self._target, name, _outside(value))

    def __bool__(self) -> bool:
        # Only where the tests make objects of its classes (`while node:`): elsewhere a value belongs.
        asked = Channel.has_classes and not self._met_value
        truth = _ask("truth", self._target)[0] if asked else None
        if type(truth) is not bool:
            raise TypeError("the candidate returned an object of its own where a value belongs")
        return truth

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            if self is other:
                return True
            if self._constructed and other._constructed:
                return _its_word(self, "__eq__", other)
            same = _same_state(self, other) or _same_state(other, self)
            if same is not None:
                return same[0]
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
        if not items and not awaits_end(sys._getframe(1)):  # noqa: SLF001 (its caller)
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
            return bool(_ask("contains", self._target, _outside(item))[0])
        # What a function returns does not learn what is looked for in it.
        return any(each == item for each in self)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and _ask("is of", self._target, _outside(instance))[0] is True

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            _ask("operate", self._target, "__exit__", [None, None, None])
            return False
        names = [each.__name__ for each in type(error).__mro__[:16]]
        left = _ask("leave", self._target, names, said_by(error))[0]
        # Only what a test raises by itself may be kept from it: a failed assert never.
        return left is True and is_said(error, trace)

    def __aiter__(self) -> Any:
        _need_own(self)
        return _ask("operate", self._target, "__aiter__", [])[0]

    async def __anext__(self) -> Any:
        items = _ask("anext", self._target)[0]
        if not items:
            raise StopAsyncIteration
        return items[0]

    async def __aenter__(self) -> Any:
        return _ask("aoperate", self._target, "__aenter__", [])[0]

    async def __aexit__(self, *_: object) -> None:
        _ask("aoperate", self._target, "__aexit__", [None, None, None])


_MADE_OF_A_VALUE = "an operator of the candidate's was given a value, and made another of it"


_SAID = frozenset({"__name__", "__qualname__", "__doc__"})


class NotSent(ValueFault):
    """An object of a class of the tests' own, which no candidate can be given."""


def _check_known(given: tuple[Any, ...]) -> None:
    for value in given:
        inside = value if isinstance(value, (list, tuple)) else (value,)
        for each in inside:
            if type(each).__module__ in ("setup", "test") and not callable(each):
                raise NotSent(
                    f"an object of the tests' own class {type(each).__name__} was given to the candidate"
                )


def _its_word(one: Remote, name: str, other: Remote) -> bool:
    """Return what the candidate's class says of two objects that the tests made of it."""
    return _ask("operate", _target(one), name, [_outside(other)])[0] is True


def _ordering(name: str) -> Callable[[Remote, object], Any]:
    def compare(self: Remote, other: object) -> Any:
        if isinstance(other, Remote) and self._constructed and other._constructed:  # noqa: SLF001
            return _its_word(self, name, other)
        return NotImplemented

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Remote, _name, _ordering(_name))


def _was_made(remote: Remote, given: tuple[Any, ...], *, by_class: bool) -> None:
    object.__setattr__(remote, "_constructed", by_class)
    object.__setattr__(remote, "_made_of", given)
    Channel.has_classes = Channel.has_classes or by_class
    if by_class:
        Channel.recent[:] = [each for each in Channel.recent if each is not remote]
    if by_class and Channel.made.wants_more():
        Channel.made.add(_ask("state", _target(remote))[0], given)
    object.__setattr__(remote, "_made_at", Channel.moment)


def _look_at_recent() -> None:
    """Ask what objects of late are, before the candidate hears what the tests make to compare them with."""
    for remote in Channel.recent[-MOST_RECENT:]:
        object.__setattr__(remote, "_state", _ask("state", _target(remote))[0])
        object.__setattr__(remote, "_made_at", Channel.moment)
    Channel.recent.clear()


MOST_RECENT = 8


def _same_state(found: Remote, made: Remote) -> tuple[bool] | None:
    """Return whether an object is in the state of one that the tests made after it came; None where that says nothing."""
    state, since, before = found._state, found._made_at, made._made_at  # noqa: SLF001
    if state is None or since >= before:
        return None
    wanted = _ask("state", _target(made))[0]
    given = made._made_of  # noqa: SLF001
    return (alike(state, wanted),) if Channel.made.tells(wanted, given) else None


def values_of(names: Sequence[str]) -> dict[str, Any]:
    """Return those of the candidate's names that are plain values, with what they are now."""
    Channel.values, Channel.heard = tuple(names), False
    found = _values_now()
    Channel.values, Channel.heard = tuple(found), False
    return found


def _values_now() -> dict[str, Any]:
    found = _ask("values", list(Channel.values))[0]
    # No other name of the tests is the candidate's to define.
    return {name: found[name] for name in Channel.values if type(found) is dict and name in found}


def _refresh() -> None:
    """Give the tests what the candidate's plain values are after a call."""
    if Channel.values:
        found = _values_now()
        for running in ("setup", "test"):
            if running in sys.modules:
                vars(sys.modules[running]).update(found)


def _need_own(remote: Remote) -> None:
    """Raise TypeError for what an operator made of a value: `len(f(3) - {1, 2})` could be anything."""
    if object.__getattribute__(remote, "_met_value"):
        raise TypeError(_MADE_OF_A_VALUE)


def _agree(remote: Remote, size: int) -> None:
    """Raise TypeError where an object said or showed another number of items before, and nothing was called since."""
    if Channel.sizes.setdefault(_target(remote), size) != size:
        raise TypeError("the candidate's object does not have as many items as it says")


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *args: Any) -> Any:
        met_value = any(
            object.__getattribute__(each, "_met_value") if isinstance(each, Remote) else name in ARITHMETIC
            for each in (self, *args)
        )
        value = _ask("operate", _target(self), name, [_outside(each) for each in args])[0]
        if met_value and name in (*ARITHMETIC, *_CONVERSIONS):
            if not isinstance(value, Remote) or name in _CONVERSIONS:
                raise TypeError(_MADE_OF_A_VALUE)
            found = Remote(_target(value), met_value=True)
            Channel.recent.append(found)
            return found
        return value

    return operate


_CONVERSIONS = (
    "__int__",
    "__float__",
    "__abs__",
    "__str__",
    "__repr__",
    "__neg__",
    "__round__",
    "__format__",
)
for _name in (
    *ARITHMETIC,
    *_CONVERSIONS,
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__enter__",
):
    setattr(Remote, _name, _operation(_name))


def _is_only_compared(argument: Any, caller: FrameType) -> bool:
    """Return whether all names of an argument, where it is used, are among those that `changeable` finds."""
    names = {name for name, value in caller.f_locals.items() if value is argument}
    return bool(names) and names <= Channel.changeable


def begin(program: str, own: Collection[str]) -> None:
    """Prepare for a test."""
    Channel.changeable, Channel.classes = changeable(program, own), classes(program, own)
    Channel.made = Made()


def _target(value: Remote) -> Any:
    return object.__getattribute__(value, "_target")


def _outside(value: Any) -> Any:
    """Return a value with the targets of the remote objects in it, and numbers for the tests' own functions."""
    if isinstance(value, Remote):
        object.__setattr__(value, "_passed", True)
        return _target(value)
    if callable(value) and not isinstance(value, type):
        Channel.functions.append(value)
        return Callback(len(Channel.functions) - 1)
    return mapped(_outside, value)


def _here(value: Any) -> Any:
    """Return a decoded value with a remote object for each reference in it."""
    if isinstance(value, Coroutine):
        return _awaited(Reference(value.number))
    if isinstance(value, Reference):
        remote = Remote(value)
        Channel.recent.append(remote)
        del Channel.recent[:-MOST_RECENT]
        return remote
    if isinstance(value, (float, complex)) and value != value:  # noqa: PLR0124 (NaN alone is not itself)
        return NoNumber()
    return mapped(_here, value)


async def _awaited(target: Reference) -> Any:
    return _ask("await", target)[0]


def _ask(*message: Any) -> tuple[Any, dict[Any, Any]]:
    """Return the candidate's value, and the arguments that it changed; its calls of the tests' functions are made meanwhile."""
    say(*message)
    if message[0] in ("call", "set") or message[2:3] in [("__setitem__",), ("__delitem__",)]:
        Channel.sizes.clear()
    while True:
        kind, *rest = decode(Channel.replies.readline())
        Channel.heard = True
        if kind == "value":
            return _here(rest[0]), rest[1]
        if kind == "error":
            raise_again(rest[0], rest[1], {name: _here(item) for name, item in rest[2].items()})
        function, args, kwargs = rest
        try:
            value = Channel.functions[function.number](
                *map(_here, args), **{name: _here(item) for name, item in kwargs.items()}
            )
        except Exception as error:  # noqa: BLE001 (the candidate called it, and gets what it raises)
            say("raised", type(error).__name__, said_by(error))
        else:
            say("returned", _outside(value))
