"""The JSON bodies of the protocol, as the client package tinker 0.38.0 sends them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from kapelle.services.request_errors import Body, neutral


class Loose(Body):
    """A body whose other parameters do not change the result, such as descriptions for people."""

    model_config = ConfigDict(extra="ignore")


class LoraSettings(Body):
    """The size and the layers of an adapter. The output head (`train_unembed`) never has an adapter."""

    rank: int = Field(ge=1, le=512)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The optimiser of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """A request for a new adapter."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: Optimizer = Optimizer()
    type: str = ""


class OfModel(Loose):
    """A request about one model."""

    model_id: str
    seq_id: int = Field(default=0, ge=0)


class Adam(Body):
    """The settings of one AdamW step. A `grad_clip_norm` of 0 means no clipping."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """A request for an optimiser step."""

    model_id: str
    seq_id: int = Field(ge=1)
    adam_params: Adam
    type: str = ""


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class Save(Body):
    """A request to save weights, as a state or for sampling."""

    model_id: str
    seq_id: int = Field(ge=1)
    path: str | None = Field(default=None, pattern=NAME)
    overwrite: bool = False
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class Load(Body):
    """A request to load a state into a model, or to create a model from a state."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None
    type: str = ""


class CreateSampler(Body):
    """A request for a sampling session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class Chunk(Body):
    """A piece of a prompt."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):
    """A prompt."""

    chunks: list[Chunk]


class SamplingSettings(Body):
    """How to sample. An empty list as `stop` means that only `max_tokens` ends a sequence."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Sample(Body):
    """A request for samples of a prompt."""

    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt: Prompt
    sampling_params: SamplingSettings
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=1024)
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: None = None
    record_stability_info: bool = False
    type: str = ""

    @field_validator("topk_sample_logprobs", "prompt_alt_tokens_k")
    @classmethod
    def _zero(cls, value: int) -> int:
        return neutral(value)

    @field_validator("record_stability_info")
    @classmethod
    def _off(cls, value: bool) -> bool:
        return neutral(value, only=False)


class Retrieve(Loose):
    """A request for the result of an earlier request."""

    request_id: str


class WeightsInfo(Body):
    """A request for the description of saved weights."""

    tinker_path: str
