"""NaN of the candidate's, in the tests' process.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

from typing import NoReturn, Self

ARITHMETIC = tuple(
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    for side in ("", "r", "i")
)
"""Operators with two sides."""


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


for _name in (*ARITHMETIC, "__neg__", "__pos__", "__abs__", "__round__"):
    setattr(NoNumber, _name, lambda *_: NoNumber())
