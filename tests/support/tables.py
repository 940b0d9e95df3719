"""A language model that is a table, with the chances that a test's game starts with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from experiments.tables import TableModel, Words

ROWS, TOKENS = 512, 3


def table_model(chances: Callable[[Words], Sequence[float]]) -> TableModel:
    """Return a table whose policies start at these chances of the next token."""
    return TableModel(
        lambda prefix: [math.log(max(chance, 1e-30)) for chance in chances(prefix)], TOKENS, ROWS
    )
