"""Measure and check the age of the weights that sampled the groups of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kapelle.rows import turns_of
from kapelle.training.rollouts import check_versions
from kapelle.types import Group


class Versions:
    """The versions of all policies at the beginning of the last steps, newest last."""

    def __init__(self, most: int) -> None:
        """Set the maximum age of weights in steps."""
        self._held: deque[dict[str, int]] = deque(maxlen=most + 1)

    def append(self, versions: Mapping[str, int]) -> None:
        """Begin a step with these versions."""
        self._held.append(dict(versions))

    @property
    def current(self) -> Mapping[str, int]:
        """The versions of the current step."""
        return self._held[-1]

    def check(self, groups: Sequence[Group], *, only_current: bool = False) -> None:
        """Raise ParityError if a token was sampled with weights that are too old or that were never published."""
        check_versions(groups, [self._held[-1]] if only_current else self._held)

    def staleness(self, groups: Sequence[Group]) -> float:
        """Return the mean age in steps of the weights that sampled the turns. The age of a turn is the mean age over its tokens."""
        ages: list[float] = []
        for _, turn in turns_of(groups):
            held = [versions[turn.policy] for versions in self._held]
            age = {version: len(held) - 1 - k for k, version in enumerate(held)}
            ages.append(
                sum(age[version] * count for version, count in turn.runs) / len(turn.completion_ids)
                if turn.versions
                else age[turn.version]
            )
        return sum(ages) / len(ages) if ages else 0.0

    def state(self) -> list[dict[str, int]]:
        """Return the versions as plain values."""
        return [dict(versions) for versions in self._held]

    def load_state(self, state: Sequence[Mapping[str, int]]) -> None:
        """Restore the state that a call of `state` returned."""
        self._held = deque((dict(versions) for versions in state), maxlen=self._held.maxlen)
