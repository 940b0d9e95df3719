"""Runs inside the candidate's sandbox: imports `solution.py` and answers one request at a time.

Nothing here is trusted: the solution shares this process and may take it over. It can then only answer for itself, as it may
anyway. A request is one line: a mark that cannot be guessed and behind it a typed value, `(operation, target, ...)`; see `_OPERATIONS`. A
reply is one line that begins with the same mark:

    ("value", value, changes, kept, printed) or, in the place of the value,
    ("error", (type names, text, arguments, attributes, the exception, its cause), ..): names of the class and of what it derives from
        `changes` are the shared arguments that are others now, by number; the tests decide whether they take them. `kept` are
        those that something here still holds.
    ("callback", operation, object, arguments, keywords): an object of the tests' is used; the next message is what came of it,
    ("returned", value) or ("raised", type names, text), or another request before it

Standard library and the encoding only: both files are copied into sandboxes as they stand.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
from collections.abc import Callable
from itertools import islice
from threading import RLock
from typing import Any, BinaryIO

from kapelle.grading.code.values import Named, ValueFault, decode, encode, said_by, type_name

LARGEST_STATE = 20_000
"""Characters of what an object shows of itself."""


def serve() -> None:
    """Answer requests from standard input on standard output until it ends."""
    # What programs build may be nested deeper than Python's own limit.
    sys.setrecursionlimit(10_000)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        Conversation(requests, replies).go_on()


class Conversation:
    """The two ends of the conversation, and the objects of both sides that the other one may name."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._mark = b""
        self._module: Any = None
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._shared: dict[str, Any] = {}
        self._stand_ins: dict[str, Any] = {}
        self._printed: io.StringIO | None = None
        self._failed: BaseException | None = None
        # Threads of the solution use the tests' objects one after another.
        self._turn = RLock()

    def go_on(self) -> list[Any]:
        """Answer requests until the result of a callback arrives, and return it; returns an empty list at the end."""
        for line in self._requests:
            self._mark, _, text = line.partition(b" ")
            self._failed = None
            operation, *rest = decode(text, self._resolve)
            if operation in ("returned", "raised"):
                return [operation, *rest]
            self._answer(operation, rest)
        return []

    def _answer(self, operation: str, rest: list[Any]) -> None:
        before = {number: encode(twin, self.refer) for number, twin in self._shared.items()}
        content: Any
        try:
            kind, content = "value", self._value(operation, *rest)
        except BaseException as error:  # noqa: BLE001 (the boundary to a program that may raise anything)
            kind, content = "error", (*_said(error), error, error.__cause__ or error.__context__)
            # Its frames hold what it was called with.
            error.__traceback__ = None
        del rest[:]
        changes = {
            number: twin
            for number, twin in self._shared.items()
            if encode(twin, self.refer) != before.get(number)
        }
        if kind == "value":
            content = self._same(operation, content, changes)
        # What nothing of the solution's holds any longer is forgotten.
        for number in [*self._shared]:
            if _references(self._shared, number) <= _OURS:
                del self._shared[number]
        printed = ""
        if self._printed is not None:
            printed = self._printed.getvalue()
            self._printed.seek(0)
            self._printed.truncate()
        self._say(kind, content, changes, list(self._shared), printed)

    def _same(self, operation: str, content: Any, changes: dict[str, Any]) -> Any:
        """Return a container that the tests know, or that an object of the solution's owns, with the number that makes it the same one."""
        if type(content) not in (list, dict, set, bytearray):
            return content
        number = next((number for number, twin in self._shared.items() if twin is content), "")
        if number and not number.startswith("c"):
            return _Told("yours", number)
        if not number and (operation != "get" or len(encode(content, self.refer)) > LARGEST_STATE):
            return content
        if not number:
            number = f"c{len(self._kept)}"
            self._kept.append(content)
            self._shared[number] = content
        changes.pop(number, None)
        return _Told("loan", number, content)

    def _say(self, *reply: Any) -> None:
        try:
            text = encode(reply, self.refer)
        except ValueFault as fault:
            said: Any = ("ValueError",), f"a value that cannot be passed on: {fault}", (), {}, None, None
            text = encode(("error", said, {}, [], ""))
        self._replies.write(self._mark + b" " + text.encode() + b"\n")
        self._replies.flush()

    def call_back(self, operation: str, number: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Use an object of the tests and return what comes of it, or raise what it raises."""
        with self._turn:
            self._say("callback", operation, number, args, kwargs)
            result = self.go_on()
        if not result:
            raise SystemExit
        if result[0] == "returned":
            return result[1]
        error = self._exception(result[1], result[2], Exception)
        raise RuntimeError(result[2]) if error is None else error

    def refer(self, value: Any) -> tuple[Any, ...] | None:
        """Return how an object that stays here is told: its number, and what it is; None for plain values."""
        kind = type(value)
        if kind is _Told:
            return value.parts  # type: ignore[no-any-return]
        if type(value) in (_StandIn, _TheirIterator) or id(value) in _theirs:
            return "theirs", _theirs[id(value)][0]
        if isinstance(value, BaseException) and not type_name(kind):
            return "object", self._number(value), ""
        if isinstance(value, type) and type_name(value):
            return None
        known = _known_kind(value)
        if known is None:
            is_true = callable(value) and not hasattr(kind, "__bool__") and not hasattr(kind, "__len__")
            nature = "true" if is_true or kind.__module__ == "re" else ""
            return (
                "object",
                self._number(value),
                kind.__name__ if kind.__name__ in ("coroutine", "generator") else nature,
            )
        if known is kind or kind.__module__ in _STANDARD:
            return None
        if known in (list, dict, set, bytearray):
            return ("object", self._number(value), known.__name__) if _is_own(kind, known) else None
        fields = getattr(value, "_fields", None)
        base = (
            Named(kind.__name__, fields, value)
            if known is tuple and type(fields) is tuple
            else _exact(known, value)
        )
        names = [
            name for name in _SEEN_BY_VALUE if getattr(kind, name, None) is not getattr(known, name, None)
        ]
        if known is tuple and fields and "__repr__" in names:
            # `namedtuple` writes a `__repr__` into each class: one that the solution has not written says nothing.
            written = (
                each for each in kind.__mro__ if "_fields" not in vars(each) and each not in (tuple, object)
            )
            names = names if any("__repr__" in vars(each) for each in written) else []
        return "sub", base, self._number(value), " ".join(names)

    def _number(self, value: Any) -> str:
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return str(number)

    def _resolve(self, kind: str, *parts: Any) -> Any:
        """Return what a part of a message stands for here."""
        if kind == "nan":
            return parts[0]
        if kind == "object":
            return self._kept[int(parts[0])]
        if kind == "name":
            try:
                return self._named(parts[0])
            except BaseException as error:  # noqa: BLE001 (the solution's own: it is said in the reply)
                self._failed = error
                return None
        if kind == "theirs":
            return self._stand_in(*parts)
        if kind == "shared":
            number, value = parts
            twin = self._shared.setdefault(number, value)
            if twin is not value:
                # The same object gets the new content.
                if isinstance(twin, (list, bytearray)):
                    twin[:] = value
                else:
                    twin.clear()
                    twin.update(value)
            return twin
        raise ValueFault(f"the unknown kind {kind[:20]!r}")

    def _stand_in(self, number: str, nature: str, name: str, *about: Any) -> Any:
        """Return what stands for an object of the tests'."""
        if number not in self._stand_ins:
            found: Any
            if nature == "function":

                def found(*args: Any, **kwargs: Any) -> Any:
                    return self.call_back("call", number, args, kwargs)

                found.__name__ = found.__qualname__ = name
                found.__doc__ = about[0]
                found.__annotations__ = about[1]
                if about[2]:
                    found.__signature__ = _signature(about[2])
            elif nature == "async function":

                async def found(*args: Any, **kwargs: Any) -> Any:
                    return self.call_back("call", number, args, kwargs)

            elif nature == "iterator":
                found = _TheirIterator(self, number)
            elif nature == "error":
                bases = tuple(
                    kind for each in about[0] if isinstance(kind := getattr(builtins, each, None), type)
                )
                found = type(name, bases[:1] or (Exception,), {})
                self._stand_ins[name] = found
            else:
                found = _StandIn(self, number, name)
            _theirs[id(found)] = (number, found)
            self._stand_ins[number] = found
        return self._stand_ins[number]

    def _value(self, operation: str, *rest: Any) -> Any:
        if operation == "capture":
            # What is printed is sent with each reply; for what is read, the tests are asked.
            prints, reads = rest
            self._printed = io.StringIO() if prints else None
            sys.stdout = self._printed or sys.__stdout__
            if reads is not None:
                builtins.input = reads
                sys.stdin = _Lines(reads)
            return None
        if operation == "share":
            # What the tests hold has changed since.
            return None
        if self._failed is not None:
            raise self._failed
        if operation == "call named":
            name, args, kwargs = rest
            return self._named(name)(*args, **kwargs)
        if operation == "fetch":
            return self._named(*rest)
        if operation == "parameters":
            return _parameters(*rest)
        if operation == "states":
            return [_state(target, self.refer) for target in rest[0]]
        if operation == "leave":
            target, names, text = rest
            error = self._exception(names, text, BaseException)
            error = Exception(text) if error is None else error
            return type(target).__exit__(target, type(error), error, None)
        return _OPERATIONS[operation](*rest)

    def _exception(self, names: list[str], text: str, above: type[BaseException]) -> BaseException | None:
        """Return an exception of the tests' as the first of its classes that the solution knows; None where it knows none."""
        for name in names:
            kind = self._stand_ins.get(name, vars(self._module).get(name, getattr(builtins, name, None)))
            if isinstance(kind, type) and issubclass(kind, above):
                return kind(text)
        return None

    def _named(self, name: str) -> Any:
        """Return what the solution calls so: where a class `Solution` holds all functions, a method of a new one."""
        if self._module is None:
            self._module = importlib.import_module("solution")
        known = vars(self._module)
        if name not in known and hasattr(known.get("Solution"), name):
            return getattr(known["Solution"](), name)
        if name not in known:
            raise NameError(f"name {name!r} is not defined", name=name)
        return known[name]


def _references(shared: dict[str, Any], number: str) -> int:
    twin = shared[number]
    return sys.getrefcount(twin)


_OURS = _references({"": []}, "")
"""References to a shared argument that are this module's own; how many of its own a function holds, each Python counts otherwise."""
_theirs: dict[int, tuple[str, Any]] = {}
_PLAIN_KINDS = (str, int, float, complex, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice)
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_STANDARD = frozenset({"builtins", "collections", "kapelle.grading.code.values"})
_SEEN_BY_VALUE = (
    "__str__", "__repr__", "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__neg__",
    "__abs__", "__getitem__", "__contains__", "__iter__",
)  # fmt: skip


def _known_kind(value: Any) -> Any:
    """Return the type as which a value can be sent; None for an object that stays."""
    kind = type(value)
    for each in _PLAIN_KINDS:
        if isinstance(value, each):
            return each
    try:
        encode(value)
    except ValueFault:
        # A collection of the standard library's may hold objects that stay.
        holds = kind.__module__ in _STANDARD and isinstance(
            value, (*_VIEWS, sys.modules["collections"].deque)
        )
        return kind if holds else None
    return kind


def _is_own(kind: type, known: type) -> bool:
    """Return whether a class has methods of its own beside those of a type."""
    above = [each for each in kind.__mro__ if each not in known.__mro__ and each.__module__ not in _STANDARD]
    plain = {"__module__", "__doc__", "__dict__", "__weakref__", "__init__", "__new__", "__qualname__"}
    return any(set(vars(each)) - plain for each in above)


def _exact(known: Any, value: Any) -> Any:
    if known is str:
        return str.__str__(value)
    if known is tuple:
        return tuple.__getitem__(value, slice(None))
    if known in (int, float, complex, bytes):
        exact: dict[Any, Callable[[Any], Any]] = {
            int: int.__index__,
            float: float.__float__,
            complex: complex.__complex__,
            bytes: bytes.__bytes__,
        }
        return exact[known](value)
    return frozenset(frozenset.__iter__(value)) if known is frozenset else value


class _Told:
    """An object that is written for the tests as these parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class _StandIn:
    """An object of the tests'."""

    def __init__(self, conversation: Conversation, number: str, name: str) -> None:
        self.__dict__["_asks"] = lambda operation, *args, **kwargs: conversation.call_back(
            operation, number, args, kwargs
        )
        self.__dict__["__name__"] = self.__dict__["__qualname__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._asks("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asks("set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._asks("call", *args, **kwargs)


class _TheirIterator:
    """An iterator of the tests'."""

    def __init__(self, conversation: Conversation, number: str) -> None:
        self._conversation, self._number = conversation, number

    def _asks(self, operation: str, *args: Any) -> Any:
        return self._conversation.call_back(operation, self._number, args, {})

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        found = self._asks("next")
        if not found:
            raise StopIteration
        return found[0]

    def send(self, value: Any) -> Any:
        found = self._asks("send", value)
        if not found:
            raise StopIteration
        return found[0]

    def close(self) -> None:
        self._asks("close")


def _signature(parameters: list[Any]) -> Any:
    """Return what `inspect.signature` says of a function of the tests'."""
    from inspect import Parameter, Signature

    kinds: list[Any] = [Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL]
    kinds += [Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD]
    return Signature(
        [
            Parameter(name, kinds[kind], default=given[0] if given else Parameter.empty)
            for name, kind, given in parameters
        ]
    )


class _Lines:
    """Standard input, of lines that `input` reads."""

    def __init__(self, reads: Callable[[], str]) -> None:
        self._reads = reads

    def readline(self) -> str:
        try:
            return self._reads() + "\n"
        except EOFError:
            return ""

    def read(self) -> str:
        return "".join(self)

    def readlines(self) -> list[str]:
        return list(self)

    def __iter__(self) -> Any:
        return iter(self.readline, "")


def _operate(target: Any, name: str, args: tuple[Any, ...]) -> Any:
    method = getattr(type(target), name, None)
    if method is None and name.startswith("__i") and name not in ("__int__", "__invert__", "__index__"):
        # `x += y` is `x = x + y` where the class says no more.
        method = getattr(type(target), f"__{name[3:]}", None)
    if method is None:
        raise TypeError(f"an object of {type(target).__name__} has no {name}")
    return method(target, *args)


def _said(error: BaseException) -> tuple[Any, ...]:
    """Return the names of an exception's classes, its text, its arguments and its attributes, so far as they are plain."""
    names = tuple(kind.__name__ for kind in type(error).__mro__[:16])
    shown = {
        name: value
        for name, value in list(vars(error).items())[:16]
        if _is_plain(value) and type(name) is str
    }
    try:
        text = said_by(error)
    except Exception:  # noqa: BLE001 (its own `__str__`)
        text = type(error).__name__
    return names, text, error.args if _is_plain(error.args) else (), shown


def _is_plain(value: Any) -> bool:
    try:
        return len(encode(value)) <= LARGEST_STATE
    except ValueFault:
        return False


def _parameters(kind: Any) -> list[str]:
    """Return the names of what a class is called with."""
    import inspect

    try:
        found = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    return [("*" if each.kind is each.VAR_POSITIONAL else "") + each.name for each in found]


def _state(target: Any, refer: Any, depth: int = 0) -> Any:
    """Return an object's class, whether that defines `__eq__`, and its attributes; None if they cannot be written, or are too large."""
    names = list(getattr(target, "__dataclass_fields__", None) or getattr(target, "__dict__", {}))
    for kind in type(target).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots

    def shown(value: Any) -> Any:
        told = refer(value)
        if told is None:
            if isinstance(value, (list, tuple)):
                return [shown(item) for item in value]
            return {key: shown(item) for key, item in value.items()} if isinstance(value, dict) else value
        if told[0] == "sub":
            return told[1]
        if told[0] != "object" or depth > 8:
            raise ValueFault("no state")
        found = _state(value, refer, depth + 1)
        if found is None:
            raise ValueFault("no state")
        return found

    try:
        found = {name: getattr(target, name, None) for name in names if not name.startswith("__")}
        attributes = {name: shown(value) for name, value in found.items()}
        own = vars(type(target)).get("__eq__", type(target).__eq__) is not vars(object)["__eq__"]
        state = [type(target).__name__, own, attributes]
        return state if attributes and len(encode(state)) <= LARGEST_STATE else None
    except (ValueFault, RecursionError):
        return None


def _run(awaited: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaited

    # One loop for the whole life: what is awaited in parts, a generator, belongs to it.
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(wait())


_loops: list[Any] = []


def _take(iterator: Any, count: int) -> tuple[list[Any], Any]:
    """Return the next items, and what a generator returned where there are none."""
    items = list(islice(iterator, count - 1))
    if len(items) == count - 1:
        try:
            items.append(next(iterator))
        except StopIteration as end:
            return items, end.value
    return items, None


def _next(iterator: Any) -> list[Any]:
    try:
        return [_run(type(iterator).__anext__(iterator))]
    except StopAsyncIteration:
        return []


def _plain(target: Any) -> list[Any]:
    """Return the built-in value that an object of a class with methods is; nothing for any other."""
    kinds: tuple[Any, ...] = (list, dict, set, bytearray)
    for kind in kinds:
        if isinstance(target, kind):
            return [kind(kind.__iter__(target)) if kind is not dict else dict(dict.items(target))]
    data, kind = getattr(target, "data", None), type(target)
    user = any(each.__module__ == "collections" and each.__name__.startswith("User") for each in kind.__mro__)
    return [data] if user or kind.__module__ == "collections" else []


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "iterate": iter,
    "take": _take,
    "await": _run,
    "operate": _operate,
    "aoperate": lambda target, name, args: _run(_operate(target, name, args)),
    "anext": _next,
    "contains": lambda target, item: item in target,
    "is of": lambda kind, target: isinstance(target, kind),
    "is below": lambda kind, other: issubclass(other, kind),
    "class": type,
    "truth": bool,
    "hash": hash,
    "equal": lambda one, other: [bool(one == other), bool(other == one)],
    "plain": _plain,
    "apply": lambda module, name, args, kwargs: getattr(importlib.import_module(module), name)(
        *args, **kwargs
    ),
}
