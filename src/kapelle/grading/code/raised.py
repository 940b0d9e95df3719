"""What the candidate raised, in the tests' process: by its own class where tests name it, and by the built-in one.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import builtins
import opcode
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

LONGEST_NAME = 100
_ENDS_ITERATIONS = (StopIteration, StopAsyncIteration)
_known: dict[str, type[Exception]] = {}


class CandidateError(Exception):
    """What the candidate raised, where it is no built-in exception."""


def exception_class(name: str) -> type[Exception]:
    """Return the class by which tests catch an exception of the candidate's."""
    return _known.setdefault(name, type(name, (CandidateError,), {}))


def forget() -> None:
    """Begin anew: no class is known."""
    _known.clear()


def is_candidates(error: BaseException) -> bool:
    """Return whether the candidate raised it, and not the tests."""
    return getattr(error, "raised_by_candidate", False) is True


def is_said(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether the tests' own `raise` raised it: what a call or an assert of theirs ends with is no such thing."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or is_candidates(error) or isinstance(error, AssertionError):
        return False
    code = trace.tb_frame.f_code
    return (
        code.co_filename.startswith("test_")
        and opcode.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    )


def raise_again(names: tuple[str, ...], text: str, attributes: Mapping[str, Any]) -> NoReturn:
    """Raise what the candidate raised, with the names of its class and of what that derives from, and its attributes."""
    found = [getattr(builtins, name, None) for name in names]
    builtin = next(
        (kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception
    )
    if issubclass(builtin, (*_ENDS_ITERATIONS, AssertionError)) or builtin is Exception:
        builtin = CandidateError
    own = next((_known[name] for name in names if name in _known), None)
    bases = tuple(dict.fromkeys(base for base in (own, builtin) if base is not None))
    if own is not None and builtin is CandidateError:
        bases = (own,)
    name = "".join(names[:1])[:LONGEST_NAME].replace("\0", "") or "CandidateError"
    raised: Any
    try:
        kind: Any = bases[0] if len(bases) == 1 and bases[0].__name__ == name else type(name, bases, {})
        raised = _made(kind, text)
    except TypeError:
        raised = CandidateError(text)
    for each, value in attributes.items():
        if each.isidentifier() and not each.startswith("_") and not hasattr(raised, each):
            setattr(raised, each, value)
    raised.raised_by_candidate = True
    raise raised


def _made(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except TypeError:  # a UnicodeDecodeError wants more than a text
        return kind.__new__(kind, text)
