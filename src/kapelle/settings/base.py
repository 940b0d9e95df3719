"""What every configurable piece shares: strict frozen settings.

A piece (an algorithm, an environment, a workflow) is a class whose fields are its settings and whose
field `name` says which one it is; `runtime/plugins.py` finds it.
"""

from __future__ import annotations

from enum import Enum

import pydantic

from kapelle.former_names import renamed_in


class MayChange(Enum):
    """Whether a run that is resumed may say a setting otherwise: `Annotated[int, FREE]` in a field's type.

    A setting without such a mark is part of what the run is.
    """

    FREE = "free"
    """No result depends on it, but by failing or by giving up what takes too much."""
    FROM_HERE_ON = "from here on"
    """What is learned later may depend on it, in its last bits at least; what was learned stays as it is."""


FREE = MayChange.FREE
FROM_HERE_ON = MayChange.FROM_HERE_ON


class Settings(pydantic.BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


__getattr__ = renamed_in(__name__)
