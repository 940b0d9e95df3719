"""One update of a step: all policies at once, some of them, or one after another, by the algorithm's order.

Critics learn at every step, whichever policies are updated.
"""

from __future__ import annotations

from collections.abc import Sequence

from kapelle.algorithm import Mover, Order, UpdateSamples
from kapelle.engines.train.protocol import Objective, TrainEngine


def update_in_order(
    engine: TrainEngine, objective: Objective, order: Order, chosen: Sequence[str], samples: UpdateSamples
) -> dict[str, float]:
    """Take the optimiser steps of the policies in `chosen` and of all critics; return metrics."""
    mover = Mover(lambda some: engine.update(some, objective), engine.score)
    return order.move(mover, chosen, samples)
