"""Relays that are demonstrated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kapelle.environments.yardsticks import Relay
from kapelle.types import Message, Task


class ShownRelay(Relay):
    """A relay whose demonstrations are right, but for those of the first seat, which err in a share."""

    name: Literal["experiments.relays:ShownRelay"] = "experiments.relays:ShownRelay"  # type: ignore[assignment]
    errs: float = Field(default=0.0, ge=0.0, le=1.0)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the letter that follows the last one; the first seat may say any other than its own."""
        seat, _, heard = messages[-1].content.partition(" ")
        if heard:
            return self.right(0, int(seat.split("/")[0]) - 1, ((0, heard),))
        draw = random.Random(f"{seed}/{agent}")
        return draw.choice(self.alphabet[1:]) if draw.random() < self.errs else self.alphabet[0]
