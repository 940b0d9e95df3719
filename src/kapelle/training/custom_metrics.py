"""Metrics of the user's own: a function of a step's episodes, whose numbers stand beside the others as `custom/NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.errors import ConfigError
from kapelle.metrics.statistics import finite
from kapelle.types import Episode, Group

Metrics = Callable[[Sequence[Episode]], Mapping[str, float]]
"""Episodes of a step or an evaluation, failed ones included → number by name."""
CUSTOM = "custom/"
"""Prefix of their names."""


class CustomMetrics:
    """Calls the function; what goes wrong in it is said once and costs no step."""

    def __init__(self, function: Metrics | None, say: Callable[[str], None]) -> None:
        """Take the function, if there is one, and who is told of its faults; ConfigError for what cannot be called."""
        if function is not None and not callable(function):
            raise ConfigError(
                f"`metrics` is {type(function).__name__}. Give a function of a list of episodes that returns numbers by name."
            )
        self._function = function
        self._say = say
        self._said: set[str] = set()

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the numbers of groups, by their names with the prefix."""
        if self._function is None:
            return {}
        try:
            found = dict(self._function([episode for group in groups for episode in group.episodes]))
        except Exception as error:  # noqa: BLE001 - the user's own code, which no step is lost for
            self._once(f"raised {type(error).__name__}: {error}")
            return {}
        row: dict[str, float] = {}
        for name, value in found.items():
            number = finite(value)
            if number is not None:
                row[f"{CUSTOM}{name}"] = number
            else:
                self._once(f"returned {str(value)[:40]!r} for '{name}', not a finite number")
        return row

    def _once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(f"the function of `metrics=` {what}; this is left out")
