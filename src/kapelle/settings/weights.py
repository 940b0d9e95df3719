"""The weights of an agent: shared, an adapter, its own model, an earlier checkpoint, or an endpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kapelle.settings.base import FREE, FROM_HERE_ON, Address, Settings

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Allowed names of agents, adapters and pools: in prompts, they appear in braces, and file names and metrics contain them."""

DType = Literal["float32", "bfloat16", "float16"]


class OwnModel(Settings):
    """The agent's own model: fully trained, trained with an adapter, or frozen."""

    model: str
    """A folder, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    train: Literal["full", "lora", "none"] = "full"
    """What is trained: all weights, an adapter, or nothing."""
    dtype: DType | None = None
    """None uses the value in the section `model`; the same applies to `device`."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """As in the section `model`."""


class NamedAdapter(Settings):
    """An adapter that several agents share by name."""

    adapter: str = Field(pattern=NAME)
    """The adapter's name."""


class PerTurn(Settings):
    """An adapter for each of an agent's turns in an episode: the k-th adapter acts in the k-th turn."""

    per_turn: int | tuple[Annotated[str, Field(pattern=NAME)], ...]
    """The number of turns, with adapters of the agent's own (`ada@1`, `ada@2`, …); or a list of adapter names, in
    which a repeated name is the same adapter."""

    @field_validator("per_turn")
    @classmethod
    def _some(cls, value: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if (value if isinstance(value, int) else len(value)) < 1:
            raise ValueError(
                "an agent must have at least one turn; give a number of at least 1, or a list of adapters"
            )
        return value


class PastAdapter(Settings):
    """An adapter saved by a run, which is frozen: a past self, for example as an opponent."""

    past: str
    """The run that saved it: `runs/mine`, `runs/mine@best` or `runs/mine@10` selects the agent's own adapter in that run.
    Alternatively, a PEFT folder, such as `runs/mine/checkpoints/00000010/policies/first`. Resolved settings hold the
    folder."""


class EndpointConfig(Settings):
    """A frozen agent behind an OpenAI-compatible URL."""

    endpoint: Annotated[Address, FROM_HERE_ON]
    """The server's address, such as `https://api.example.com/v1`."""
    model: str
    """Name of the model on the server."""
    api_key_env: Annotated[str, FREE] = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never stored."""


Weights = (
    Literal["shared", "lora", "frozen"] | OwnModel | NamedAdapter | PerTurn | PastAdapter | EndpointConfig
)
