"""One update of a step: all policies at once, some of them, or one after another, by the algorithm's order.

Critics learn at every step, whichever policies are updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapelle.algorithm import Mover, Order
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.rows import Sample, TurnKey
from kapelle.types import Group


def update_in_order(
    engine: TrainEngine,
    objective: Objective,
    order: Order,
    chosen: Sequence[str],
    policies: Mapping[TurnKey, Sample],
    critics: Sequence[Sample],
    groups: Sequence[Group],
) -> dict[str, float]:
    """Take the optimiser steps of the policies in `chosen` and of all critics; return metrics.

    `policies` holds each credited turn's sample, `critics` what critics learn from.
    """
    mover = Mover(lambda samples: engine.update(samples, objective), engine.score)
    return order.move(mover, chosen, policies, critics, groups)
