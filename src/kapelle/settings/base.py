"""What every configurable piece shares: strict frozen settings.

A piece (an algorithm, an environment, a workflow) is a class whose fields are its settings and whose
field `name` identifies it; `runtime/plugins.py` finds the class for a name.
"""

from __future__ import annotations

from enum import Enum

import pydantic

from kapelle.former_names import renamed_in


class MayChange(Enum):
    """Whether a resumed run may change a setting: `Annotated[int, FREE]` in a field's type.

    A setting without such a mark belongs to the identity of the run and cannot change.
    """

    FREE = "free"
    """No result depends on it, except that something may fail or be given up for taking too long."""
    FROM_HERE_ON = "from here on"
    """What is learned later may depend on it, if only in the last bits; what was learned so far stays as it is."""


FREE = MayChange.FREE
FROM_HERE_ON = MayChange.FROM_HERE_ON


class Settings(pydantic.BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


__getattr__ = renamed_in(__name__)
