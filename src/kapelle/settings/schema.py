"""The settings of a run: frozen, strict, and each said in one place.

A recipe is YAML of this shape. The sections `algorithm`, `environment`, `workflow`, `engine` and `train_engine` are
settings of whatever class their `name` finds. Reading files, overlays and error texts live in `setup/recipe.py`; what
combinations mean together is checked in `setup/validation.py`.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, create_model, field_validator

from kapelle.runtime.deadlines import Patience
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.settings.sections import (
    AlgorithmSettings,
    EnvironmentSettings,
    Plugged,
    Section,
    WorkflowSettings,
)

NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""What agents and adapters may be called: prompts put names in braces, and files and metrics carry them."""

DType = Literal["float32", "bfloat16", "float16"]


class EmbeddedConfig(Settings):
    """Size of the model that kapelle makes itself: Qwen3 architecture, initialised from a seed."""

    hidden: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate: int = Field(384, ge=8)
    context: int = Field(512, ge=16)
    """Most tokens (bytes of text) that it reads."""
    seed: int = 0


class ModelConfig(Settings):
    """The base model that the team stands on."""

    path: str = "embedded"
    """`embedded` (made here), a local folder, or a name on the Hugging Face hub."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    dtype: DType = "float32"
    """Compute type of forward and backward; weights that train are kept in float32."""


class LoraConfig(Settings):
    """Size and place of the adapters; see `team.Lora`."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    dropout: float = Field(0.0, ge=0.0, lt=1.0)


class OwnModel(Settings):
    """Weights of an agent's own: another model, trained in full, by adapter, or not at all."""

    model: str
    train: Literal["full", "lora", "none"] = "full"


class NamedAdapter(Settings):
    """An adapter that several agents share by naming it."""

    adapter: str = Field(pattern=NAME)


class PerTurn(Settings):
    """An adapter for each of an agent's own turns in an episode: its k-th turn is the k-th adapter's."""

    per_turn: int | tuple[Annotated[str, Field(pattern=NAME)], ...]
    """How many turns, with adapters of the agent's own (`ada@1`, `ada@2`, …); or their adapters by name, where a
    name that comes again is the same adapter."""

    @field_validator("per_turn")
    @classmethod
    def _some(cls, value: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if (value if isinstance(value, int) else len(value)) < 1:
            raise ValueError("an agent has one turn or more; name a number from 1, or a list of adapters")
        return value


class PastAdapter(Settings):
    """An adapter as a run has saved it, which learns no more: a past self to play against."""

    past: str
    """Its PEFT folder, for example `runs/mine/checkpoints/00000010/policies/first`."""


class EndpointConfig(Settings):
    """A frozen agent behind an OpenAI-compatible URL."""

    endpoint: Annotated[str, FROM_HERE_ON]
    model: str
    api_key_env: Annotated[str, FREE] = "OPENAI_API_KEY"


Weights = (
    Literal["shared", "lora", "frozen"] | OwnModel | NamedAdapter | PerTurn | PastAdapter | EndpointConfig
)


class SamplingConfig(Settings):
    """How agents sample while they learn; see `types.Sampling`."""

    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    stop: tuple[str, ...] = ()


class AgentConfig(Settings):
    """One agent: what it is told, which weights act for it, how it samples."""

    name: str = Field(pattern=NAME)
    weights: Weights | None = None
    """None takes `team.sharing`."""
    lora: LoraConfig | None = None
    """None takes `team.lora`."""
    system: str | None = None
    prompt: str | None = None
    sampling: SamplingConfig | None = None
    """None takes `team.sampling`."""
    share_critic_with: str | int | None = None
    """Name or seat number (from 0) of the agent whose critic this one uses too."""


class TeamConfig(Settings):
    """The team: agents and how they share weights."""

    sharing: Literal["shared", "lora", "frozen"] = "lora"
    """`shared`: one set of full weights; `lora`: one adapter per agent; `frozen`: nothing trains."""
    lora: LoraConfig = LoraConfig()
    sampling: SamplingConfig = SamplingConfig()
    agents: int | tuple[AgentConfig, ...] = 1
    """The agents in seat order, or how many alike (`agent_0`, `agent_1`, …)."""
    critic_lora: LoraConfig = LoraConfig()
    critic_sharing: Literal["own", "shared"] | None = None
    """None takes the algorithm's: own critics where they are local, one where it is central."""


class OptimizerConfig(Settings):
    """AdamW (1711.05101), one instance per policy."""

    lr: float = Field(1e-5, gt=0)
    critic_lr: float | None = Field(None, gt=0)
    """None takes `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Norm to which each policy's gradient is clipped, on its own; null turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the rate rises from 0."""


class RewardModelConfig(Settings):
    """A trained reward model: λ times its score of an answer is a term of the reward of its turn."""

    path: str
    """Folder `verifier` of a checkpoint of `algorithm.name: verifier`, or `stage:NAME`."""
    weight: float = 1.0
    """λ, in units of reward; scores lie between 0 and 1."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """Where it reads, with weights of its own; null shares the base that it stands on."""


class WarmupConfig(Settings):
    """Supervised warm-up on scripted demonstrations of the roles, before anything else; cached."""

    steps: int = Field(400, ge=1)
    demonstrations: int = Field(20_000, ge=1)
    """How many episodes the script plays on the training split."""
    batch: int = Field(48, ge=1)
    """Sequences per step."""
    lr: float = Field(3e-3, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"


class TrainingConfig(Settings):
    """How much to train, and when to stop."""

    steps: Annotated[int, FREE] = Field(50, ge=0)
    """A rate that ends with them (`optimizer.schedule`) ends with those that are said last."""
    tasks_per_step: int = Field(32, ge=1)
    """Tasks (groups) per step; each is played `algorithm.group_size` times."""
    max_staleness: int = Field(0, ge=0)
    """Steps by which rollouts may run ahead of the update; 0 is on-policy. Above 0 every step but the first ones
    learns from what older weights said: see `algorithm.loss.importance_cap` and `algorithm.gae.vtrace`."""
    microbatch_tokens: Annotated[int, FROM_HERE_ON] = Field(4096, ge=1)
    """Most tokens in one forward and backward pass; the result does not depend on it."""
    max_failed_share: Annotated[float, FREE] = Field(0.2, ge=0.0, le=1.0)
    """The run stops when a greater share of a step's episodes failed."""
    parity_tolerance: Annotated[float | None, FREE] = Field(None, gt=0)
    """Greatest |trainer − sampler| log-prob (nats); None takes 1e-4 in float32 and a measured bound
    in half precision."""
    non_finite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """What a loss or gradient that is not finite does to its step."""


class EvaluationConfig(Settings):
    """Held-out problems, always from the `test` split."""

    problems: int = Field(500, ge=1)
    every: int = Field(0, ge=0)
    """Steps between evaluations while training; 0 evaluates only before and after."""
    problems_while_training: int = Field(100, ge=1)
    greedy: bool = True
    """False samples as in training."""
    before_and_after: bool = True


class CheckpointConfig(Settings):
    """When to save, how many to keep."""

    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class Timed(Settings):
    """What every environment and every engine has beside its own settings."""

    timeout: Annotated[float, FREE] = Field(Patience.environment, gt=0, allow_inf_nan=False)
    """Seconds after which one call of the environment, or one request to the engine, is given up; its episode is then
    an error. The wait for a turn (with the model, a connection, a sandbox) does not count, nor does the time in which
    this process is stopped."""


class EpisodeConfig(Settings):
    """What bounds an episode."""

    timeout: Annotated[float, FREE] = Field(Patience.episode, gt=0, allow_inf_nan=False)
    """Seconds from its start, after which it is given up and is an error."""


class GraderConfig(Settings):
    """What bounds the grading of one text."""

    timeout: Annotated[float, FREE] = Field(Patience.grader, gt=0, allow_inf_nan=False)
    """Seconds after which its episode is an error. The wait for a turn with a sandbox or a judge does not count."""


def timed(settings: type[Settings], section: str) -> type[Settings]:
    """Return settings with a `timeout` beside their own, which has the default of an environment or an engine."""
    return settings if "timeout" in settings.model_fields else _timed(settings, section)


@lru_cache(maxsize=256)
def _timed(settings: type[Settings], section: str) -> type[Settings]:
    field = copy(Timed.model_fields["timeout"])
    field.default = Patience.engine if section == "engine" else Patience.environment
    made = create_model(
        settings.__name__,
        __base__=settings,
        __module__=settings.__module__,
        timeout=(Annotated[float, FREE], field),
    )
    made.__qualname__ = settings.__qualname__
    return made


class TrackerConfig(Settings):
    """A tracker beside the run directory's own files."""

    name: Literal["tensorboard", "wandb"]
    project: str = "kapelle"
    offline: bool = True


class RunConfig(Settings):
    """Everything that a run depends on; the resolved form is written beside its results."""

    name: str = "run"
    description: Annotated[str, FREE] = ""
    seed: int = Field(0, ge=0)
    model: ModelConfig = ModelConfig()
    team: TeamConfig = TeamConfig()
    environment: Annotated[EnvironmentSettings, Plugged()]
    """Settings of the class that `environment.name` finds; see `setup.recipe.resolve`."""
    workflow: Annotated[WorkflowSettings, Plugged()]
    algorithm: Annotated[AlgorithmSettings, Plugged()]
    engine: Annotated[Section, Plugged()]
    """Settings of the rollout engine that `engine.name` finds; `local` unless said otherwise."""
    train_engine: Annotated[Section, Plugged(), FROM_HERE_ON]
    """Settings of the train engine that `train_engine.name` finds; `torch` unless said otherwise."""
    warmup: WarmupConfig | None = None
    reward_model: RewardModelConfig | None = None
    optimizer: Annotated[OptimizerConfig, FROM_HERE_ON] = OptimizerConfig()
    episode: EpisodeConfig = EpisodeConfig()
    grader: GraderConfig = GraderConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: Annotated[EvaluationConfig, FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    trackers: Annotated[tuple[TrackerConfig, ...], FREE] = ()

    @property
    def patience(self) -> Patience:
        """After how many seconds something is given up."""
        return Patience(
            environment=float(getattr(self.environment, "timeout", Patience.environment)),
            episode=self.episode.timeout,
            engine=float(getattr(self.engine, "timeout", Patience.engine)),
            grader=self.grader.timeout,
        )
