"""Defines the weights of an agent: shared weights, an adapter, the agent's own model, an earlier checkpoint, or an endpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kapelle.settings.base import FREE, FROM_HERE_ON, Address, Settings

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""A regular expression for the allowed names of agents, adapters and pools. The names appear in braces in prompts, in file
names and in metrics."""

DType = Literal["float32", "bfloat16", "float16"]


class OwnModel(Settings):
    """Settings of a model that only this agent uses. The model is fully trained, trained with an adapter, or frozen."""

    model: str
    """The model: a folder, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    train: Literal["full", "lora", "none"] = "full"
    """Which weights are trained: all weights, an adapter, or none."""
    dtype: DType | None = None
    """The data type of the model. If `dtype` or `device` is null, the value in the section `model` is used."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """The device of the model. If null, the value in the section `model` is used."""


class NamedAdapter(Settings):
    """Settings of an adapter that several agents share by name."""

    adapter: str = Field(pattern=NAME)
    """The name of the adapter."""


class PerTurn(Settings):
    """Settings of a separate adapter for each of an agent's turns. The k-th adapter is used in the k-th turn of an episode."""

    per_turn: int | tuple[Annotated[str, Field(pattern=NAME)], ...]
    """The number of turns, in which case the adapters belong to the agent (`ada@1`, `ada@2`, …), or a list of adapter names. If
    a name occurs several times in the list, these turns share the adapter."""

    @field_validator("per_turn")
    @classmethod
    def _some(cls, value: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if (value if isinstance(value, int) else len(value)) < 1:
            raise ValueError(
                "an agent must have at least one turn; give a number of at least 1, or a list of adapters"
            )
        return value


class PastAdapter(Settings):
    """Settings of a frozen adapter that a run saved, for example an earlier version of the agent as an opponent."""

    past: str
    """The run that saved the adapter, or a PEFT folder. A run (`runs/mine`, `runs/mine@best` or `runs/mine@10`) selects the
    agent's own adapter in that run. An example of a PEFT folder is `runs/mine/checkpoints/00000010/policies/first`. In the
    resolved settings, the value is always the folder."""


class EndpointConfig(Settings):
    """Settings of a frozen agent behind an OpenAI-compatible URL."""

    endpoint: Annotated[Address, FROM_HERE_ON]
    """The address of the server, for example `https://api.example.com/v1`."""
    model: str
    """The name of the model on the server."""
    api_key_env: Annotated[str, FREE] = "OPENAI_API_KEY"
    """The environment variable that contains the API key. The key itself is never stored."""


Weights = (
    Literal["shared", "lora", "frozen"] | OwnModel | NamedAdapter | PerTurn | PastAdapter | EndpointConfig
)
