"""The settings of a run: frozen, strict, and each declared in one place.

A recipe is YAML of this shape. The sections `algorithm`, `environment`, `workflow`, `engine` and `train_engine` are
settings of the class that their `name` finds. Files and overlays are read in `setup/recipe.py`, errors are in
`settings/messages.py`, and checks of combinations are next to each section (`settings/checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from functools import lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator

from kapelle.environment import UsesModels, offers
from kapelle.errors import did_you_mean
from kapelle.features.ahead.settings import AheadSettings
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.features.curriculum.settings import CurriculumConfig, DifficultyConfig
from kapelle.features.entropy.settings import EntropyConfig
from kapelle.features.league.settings import LeagueConfig
from kapelle.features.replay.settings import ReplayConfig
from kapelle.features.reward_model.settings import RewardModelConfig
from kapelle.features.warmup.settings import WarmupConfig
from kapelle.runtime.deadlines import Patience
from kapelle.settings.base import (
    FREE,
    FROM_HERE_ON,
    AlgorithmSettings,
    EnvironmentSettings,
    Plugged,
    Section,
    Settings,
    WorkflowSettings,
    named_settings,
)
from kapelle.settings.weights import NAME, DType, Weights
from kapelle.team import ALL_LINEAR
from kapelle.types import Constraint, Sampling

if TYPE_CHECKING:
    from kapelle.settings.checks import Check, RunToCheck

# -------- The data that a run keeps: checkpoints, episodes, credit of tokens, trackers.

EVERYONE = "*"
"""In `start_from`, stands for every trained policy without its own entry."""


def by_agent(value: object) -> object:
    """Return `start_from` as a mapping; a single folder applies to all policies."""
    return {EVERYONE: value} if isinstance(value, str) else value


StartFrom = Annotated[dict[str, str], BeforeValidator(by_agent)]


class CheckpointConfig(Settings):
    """When to save checkpoints and how many to keep."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""
    best: str | None = None
    """Metric of evaluations (or of steps, if evaluations do not have it) that selects the best checkpoint, which is kept
    in addition to the newest: `success`, `reward/solver`. A checkpoint is saved after every evaluation that is better
    than all previous ones."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the best value of `best` is the highest or the lowest."""
    background: bool = False
    """Whether training continues while a checkpoint is written from a copy in the machine's memory. Only one is written
    at a time; it counts as soon as it is complete."""


class EpisodesConfig(Settings):
    """How long recorded episodes are kept; older ones are deleted after a checkpoint, in whole files of up to 16 steps."""

    keep: int | None = Field(default=None, ge=1)
    """Number of newest training steps for which episodes and traces are always kept; null keeps all."""
    keep_evaluations: int | None = Field(default=None, ge=1)
    """Number of newest training steps for which the episodes of evaluations are always kept; null keeps all."""


class RecordConfig(Settings):
    """The data that a run records for people, in addition to the data that it needs to resume."""

    credit_episodes: int = Field(default=2, ge=0)
    """Number of episodes per step for which each token's advantage, credit, ratio and entropy are kept: the best and the
    worst episode of the groups whose returns differ most. 0 keeps none."""


class TrackerConfig(Settings):
    """A tracker in addition to the files of the run directory."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str = "kapelle"
    """Name of the project, or of MLflow's experiment."""
    offline: bool = True
    """Whether to keep everything on this machine, if the tracker supports it."""
    transcripts: int = Field(default=10, ge=0)
    """Steps between two tables with completions from a few episodes; 0 sends no tables."""


# -------- Placement on a Ray cluster (`kapelle train … --launch ray`).


class Resources(Settings):
    """Resources that Ray reserves for one actor; an actor may use more."""

    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """CPU cores; also the number of threads that torch uses (at least one)."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """GPUs; with a fraction, several actors share a GPU. An actor sees only its own GPUs."""


class SamplingPool(Settings):
    """Sampling workers that hold the models of some agents only."""

    agents: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(min_length=1)
    """The agents that use the models of this pool; agents that share a model belong to one pool."""
    workers: int = Field(default=1, ge=1)
    """Number of workers; rollout workers are assigned to them in turn."""
    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """CPU cores of each worker; see `Resources`."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """GPUs of each worker."""

    @property
    def takes(self) -> Resources:
        """Resources of each worker."""
        return Resources(cpus=self.cpus, gpus=self.gpus)


class RayConfig(Settings):
    """Actors that `--launch ray` starts on a cluster, and their resources."""

    address: str | None = None
    """The cluster's address (`auto`, or `host:port`); null starts Ray on this machine until the run ends."""
    rollout_workers: int = Field(default=1, ge=0)
    """Actors that roll out episodes, distributed over the ranks of the trainer; with 0, the ranks roll out episodes, as without Ray."""
    least_rollout_workers: int | None = Field(default=None, ge=1)
    """Number of rollout workers for which the run waits; other workers join when the cluster has room, and may leave.
    null waits for all. Results are bitwise identical for any number of workers."""
    trainer: Resources = Resources()
    """Resources of each rank of the trainer."""
    rollout: Resources = Resources()
    """Resources of each rollout worker."""
    scoring_workers: int = Field(default=0, ge=0)
    """Actors that score for all ranks with frozen models: a verifier (`reward_model`), a teacher, an embedding model.
    With 0, the ranks hold these models and score, as without Ray."""
    scoring: Resources = Resources()
    """Resources of each scoring worker."""
    pools: dict[str, SamplingPool] = Field(default={})
    """Name → a pool of sampling workers: `{big: {agents: [solver], workers: 2, gpus: 2}}`. They sample these agents'
    turns; rollout workers hold the models of all other agents."""
    environment: Resources = Resources()
    """Resources of each environment worker; `episode.environment_workers` is their number per sampling process."""
    spread: bool = False
    """Whether to place actors on as many machines as possible; otherwise on as few as possible."""
    timeout: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """Time within which the cluster must have room for all actors, and each actor must start, in seconds."""

    @field_validator("pools")
    @classmethod
    def _named(cls, value: dict[str, SamplingPool]) -> dict[str, SamplingPool]:
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"the name '{name}' is invalid: use letters, digits and _")
        return value

    @model_validator(mode="after")
    def _with_workers(self) -> RayConfig:
        if self.pools and not self.rollout_workers:
            raise ValueError("`ray.pools` need rollout workers. Set `ray.rollout_workers` to 1 or more")
        return self


class EmbeddedConfig(Settings):
    """Size of the embedded model: the Qwen3 architecture, initialised from a seed."""

    hidden: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(default=4, ge=1)
    """Number of decoder blocks."""
    heads: int = Field(default=4, ge=1)
    """Number of attention heads per block."""
    kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads; it must divide `heads`."""
    intermediate: int = Field(default=384, ge=8)
    """Width of the MLP."""
    context: int = Field(default=512, ge=16)
    """Maximum number of tokens (bytes of text)."""
    seed: int = 0
    """Seed of the initial weights."""
    sees: bool = False
    """Whether the model can read images: it then has the architecture of Qwen2.5-VL, with a frozen, random vision tower of two blocks."""

    @model_validator(mode="after")
    def _fitting(self) -> EmbeddedConfig:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`kv_heads: {self.kv_heads}` does not divide `heads: {self.heads}`. Set a divisor of `heads`, such as 1"
            )
        width = self.hidden // self.heads
        if width < 2 or width % 2 or (self.sees and self.hidden % self.heads):
            raise ValueError(
                f"`hidden: {self.hidden}` gives each of {self.heads} heads {width} dimensions, but rotary "
                f"positions need an even number. Set `hidden` to a multiple of {2 * self.heads}"
            )
        return self


class ModelConfig(Settings):
    """The team's base model."""

    path: str = "embedded"
    """`embedded`, a local folder, a GGUF file, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    dtype: DType = "float32"
    """Compute type of forward and backward passes, and storage type of frozen weights; trained weights are stored in float32."""
    tf32: Annotated[bool, FROM_HERE_ON] = False
    """Whether CUDA computes float32 products in TF32: several times as fast, with 10 bits of mantissa instead of 23. It
    has no effect on a CPU."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """`cpu`, `cuda`, `cuda:1`, …; None uses `cuda` if it is available (`cpu` for the embedded model)."""
    quantization: Literal["nf4"] | None = None
    """How to store frozen pretrained base models: `nf4` uses four bits per weight, on CUDA, with `kapelle[quantised]`;
    `transformers` samples from them."""
    routing: Literal["free", "replayed"] = "free"
    """`replayed`: training routes each token to the experts that sampling chose (R3, 2510.11370)."""
    router: Literal["frozen", "trained"] = "frozen"
    """Whether the routers of a mixture of experts are trained, if all its weights are trained."""
    kernels: Annotated[Literal["auto", "plain"], FROM_HERE_ON] = "auto"
    """On CUDA, `auto` uses kernels of torch and Triton that pass a test at their first use; `plain` uses plain torch operations."""
    chat_template: str | None = None
    """The chat template to use instead of the model's own: `plain` for base models, which have none (`User: …`,
    `Assistant: …`), or a Jinja file."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `{enable_thinking: false}`, for all agents on this model."""


class LoraConfig(Settings):
    """Size and layers of the adapters; see `team.Lora`."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of layers, or `all-linear`: see docs/models.md."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class SamplingConfig(Settings):
    """How agents sample in training; see `types.Sampling`."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    choices: Literal["legal"] | tuple[str, ...] | None = None
    """Every completion is one of these strings. `legal`: in turns for which the environment lists moves, every completion
    is one of these moves."""
    regex: str | None = None
    """Every completion as a whole matches this regular expression (Rust's syntax: no look-around, no back-references)."""
    json_schema: dict[str, object] | None = None
    """Every completion is JSON that matches this schema."""
    grammar: str | None = None
    """Every completion is in the language of this grammar (Lark, in llguidance's syntax)."""

    @model_validator(mode="after")
    def _one_form(self) -> SamplingConfig:
        forms = {
            "choices": self.choices,
            "regex": self.regex,
            "json_schema": self.json_schema,
            "grammar": self.grammar,
        }
        given = [form for form, value in forms.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` cannot be combined: remove one")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on completions; None for free text."""
        if self.choices is not None:
            return Constraint.legal() if self.choices == "legal" else Constraint.choices(self.choices)
        if self.regex is not None:
            return Constraint.regex(self.regex)
        if self.json_schema is not None:
            return Constraint.json_schema(self.json_schema)
        return None if self.grammar is None else Constraint.grammar(self.grammar)

    def build(self) -> Sampling:
        """Return the agent's sampling settings."""
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, self.constraint)


Schedule = Literal["constant", "linear", "cosine"]


class RateConfig(Settings):
    """The learning rates of an agent's policy and critic; null uses the section `optimizer`."""

    lr: float | None = Field(default=None, gt=0)
    critic_lr: float | None = Field(default=None, gt=0)
    schedule: Schedule | None = None
    warmup_steps: int | None = Field(default=None, ge=0)


class ExampleConfig(Settings):
    """A user message and the agent's response, as they appear in the agent's prompt."""

    user: str
    """The message before the response."""
    assistant: str
    """The agent's response."""


class AgentConfig(Settings):
    """One agent: its prompts, its weights, and how it samples."""

    name: str = Field(pattern=NAME)
    weights: Weights | None = None
    """None uses `team.sharing`."""
    lora: LoraConfig | None = None
    """None uses `team.lora`."""
    system: str | None = None
    prompt: str | None = None
    sampling: SamplingConfig | None = None
    """None uses `team.sampling`."""
    examples: tuple[ExampleConfig, ...] = ()
    """Questions with answers that the agent reads before its task (few-shot), in this order."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the chat template of its model, which take precedence over those of the section `model`."""
    share_critic_with: str | int | None = None
    """Name or index (from 0) of the agent with which this one shares a critic."""
    optimizer: Annotated[RateConfig | None, FROM_HERE_ON] = None
    """None uses the section `optimizer`."""


class TeamConfig(Settings):
    """The team: agents and how they share weights."""

    sharing: Literal["shared", "lora", "frozen"] = "lora"
    """`shared`: one set of full weights; `lora`: one adapter per agent; `frozen`: no policy is trained."""
    lora: LoraConfig = LoraConfig()
    sampling: SamplingConfig = SamplingConfig()
    agents: int | tuple[AgentConfig, ...] = 1
    """The agents in order, or a number of identical agents (`agent_0`, `agent_1`, …)."""
    critic_lora: LoraConfig = LoraConfig()
    critic_sharing: Literal["own", "shared"] | None = None
    """None uses the algorithm's choice: local critics per agent, or one central critic."""
    critic_model: str | None = None
    """Base model of critics and of a verifier (`reward_model`): a folder or a name on a hub, of any family. They then
    read the text with this model's tokeniser. Null uses each agent's own model."""
    critic_train: Literal["lora", "full", "head"] = "lora"
    """The trained weights of critics: an adapter (`critic_lora`), all weights of a copy of the model, or only the head."""
    critic_dtype: DType | None = None
    """If this or `critic_device` is set, critics and a verifier use their own copy of the base model."""
    critic_device: Annotated[str | None, FROM_HERE_ON] = None
    """See `critic_dtype`."""


class OptimizerConfig(Settings):
    """AdamW (1711.05101), one instance per policy."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """The 8-bit variants store moments in one byte (2110.02861), for full weights on CUDA; they need `kapelle[quantised]`."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate; for full weights, usually a tenth of the rate for adapters."""
    critic_lr: float | None = Field(default=None, gt=0)
    """None uses `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Norm to which the gradient of each policy is clipped separately; null disables clipping."""
    schedule: Schedule = "constant"
    """Learning rate after `warmup_steps`, until the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimiser steps over which the learning rate rises; it is 0 at the first step, as in transformers, TRL and verl."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all optimiser steps, rounded up; for runs whose length is set by `training.epochs`."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_share:
            raise ValueError("`warmup_steps` and `warmup_share` cannot be combined; remove one")
        return self

    def rising(self, total: int) -> int:
        """Return the number of steps over which the rate rises, out of `total` steps."""
        return ceil(self.warmup_share * total) if self.warmup_share else self.warmup_steps


class AmountConfig(Settings):
    """How much to train."""

    steps: Annotated[int, FREE] = Field(default=50, ge=0)
    """Number of steps; schedules (`optimizer.schedule`, `loss.entropy_end`) end with the last value."""
    epochs: Annotated[float | None, FREE] = Field(default=None, gt=0, allow_inf_nan=False)
    """Number of passes over all training tasks, from which `steps` is computed: the last step is filled with tasks of the
    next epoch. Null uses `steps`."""
    critic_warmup: int = Field(default=0, ge=0)
    """Number of steps at the start in which only critics are trained, or the utilities and mixer of `vdn` and `qmix`."""
    tasks_per_step: int = Field(default=32, ge=1)
    """Tasks (groups) per step; each has `algorithm.group_size` episodes."""


class TrainingConfig(AheadSettings, AmountConfig):
    """How much to train, when episodes are collected, and when to stop."""

    microbatch_tokens: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], FROM_HERE_ON] = "auto"
    """Maximum tokens in one forward and backward pass; results do not depend on it. `auto` is 4096 on a CPU; on a GPU, it
    is the number that fits into memory at the first pass."""
    gradient_checkpointing: Annotated[bool, FROM_HERE_ON] = False
    """Whether to keep only the input of each decoder block and recompute the block in the backward pass: gradients are
    the same, memory is lower, and an update takes about 1.5 times as long."""
    max_failed_share: Annotated[float, FREE] = Field(default=0.2, ge=0.0, le=1.0)
    """The run stops when a larger share of a step's episodes fails."""
    parity_tolerance: Annotated[float | None, FREE] = Field(default=None, gt=0)
    """Largest |trainer − sampler| log-prob (nats); in half precision, a few tokens may exceed it. None uses 1e-4 in float32, 0.25 in
    bfloat16 and 0.1 in float16."""
    non_finite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """Whether a step with a non-finite loss or gradient stops the run or is skipped."""


class TasksConfig(Settings):
    """Which of the environment's tasks are used."""

    max_prompt_tokens: Annotated[int, Field(ge=1)] | Literal["context"] | None = None
    """Maximum number of tokens of an agent's first prompt: tasks with a longer first prompt are excluded from training
    and evaluations. `context` is the model's context minus the agent's `max_tokens`. Null excludes no tasks; if one of
    the first tasks does not fit the model, an error is raised."""
    difficulty: DifficultyConfig | None = None
    curriculum: CurriculumConfig | None = None
    replay: ReplayConfig | None = None


TestSet = Annotated[
    EnvironmentSettings,
    Plugged(),
    BeforeValidator(
        partial(named_settings, missing="it does not specify an environment: write `{name: math, …}`")
    ),
]


class SetConfig(Settings):
    """Settings of one set of `evaluation.sets`; null uses the value of `evaluation`."""

    samples: int | None = Field(default=None, ge=1)
    """Number of answers to each problem of the set."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Sampling temperature of all agents in this set."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Minimum total probability of the tokens that are kept."""
    top_k: int | None = Field(default=None, ge=0)
    """Number of most likely tokens that are kept; 0 keeps all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer."""


class EvaluationConfig(Settings):
    """How the team is evaluated on held-out problems, which always come from the `test` split."""

    problems: int = Field(default=500, ge=1)
    """Number of problems of an evaluation before and after training."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations during training; 0 evaluates only before and after."""
    problems_while_training: int = Field(default=100, ge=1)
    """Number of problems of an evaluation during training."""
    greedy: bool = True
    """Whether agents choose the most likely token; false samples as in training."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Sampling temperature of all agents, instead of `greedy`; null uses `greedy`."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Minimum total probability of the tokens that are kept, if agents are sampled; null uses the value of training."""
    top_k: int | None = Field(default=None, ge=0)
    """Number of most likely tokens that are kept, if agents are sampled; 0 keeps all, and null uses the value of training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer; null uses the value of training."""
    samples: int = Field(default=1, ge=1)
    """Number of answers to each problem; several answers are sampled. Success is then the mean over problems (avg@k);
    pass@k (2107.03374) and, if answers can be compared, maj@k (2203.11171) are reported too."""
    sets: dict[str, TestSet] = Field(default={})
    """Further sets of problems. Each has a name, and the settings of an environment with this test split: `{aime: {name: math, …}}`.
    Each set has its own rates; a problem that is also in the training rows raises an error."""
    for_set: dict[str, SetConfig] = Field(default={})
    """Settings of single sets, by name: `{aime: {samples: 32, temperature: 0.6}}`."""
    prices: dict[
        str,
        tuple[
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
        ],
    ] = Field(default={})
    """Price of a million prompt tokens and of a million completion tokens, by agent; `default` is for all other agents."""
    before_and_after: bool = True
    """Whether to evaluate on `problems` before the first and after the last step."""

    @field_validator("sets")
    @classmethod
    def _named(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"the name '{name}' is invalid: use letters, digits and _")
        return value

    @model_validator(mode="after")
    def _several_differ(self) -> EvaluationConfig:
        unknown = [name for name in self.for_set if name not in self.sets]
        if unknown:
            raise ValueError(
                f"`for_set` contains '{unknown[0]}', which is not in `sets` ({', '.join(self.sets) or 'there is none'})"
            )
        for name, own in {"": self, **{name: self.of_set(name) for name in self.for_set}}.items():
            if own.samples > 1 and own.always_greedy:
                raise ValueError(
                    f"`{f'for_set.{name}.' if name else ''}samples: {own.samples}` answers to a problem would "
                    "all be the same; also set `evaluation.greedy: false` or a `temperature`"
                )
        return self

    @property
    def always_greedy(self) -> bool:
        """Whether agents always choose the most likely token."""
        return self.greedy if self.temperature is None else not self.temperature

    def of_set(self, name: str) -> EvaluationConfig:
        """Return the evaluation settings of a set."""
        own = self.for_set.get(name, SetConfig())
        given = {key: value for key, value in own.model_dump().items() if value is not None}
        return self.model_copy(update=given)


MOST_EPISODES = 1_000_000
"""Maximum number of episodes of one step or one evaluation, which are all in memory at the same time."""


def check_amount(run: RunToCheck) -> Iterator[str]:
    """Yield a message for each number of episodes for which no machine has enough memory."""
    config = run.config
    tasks, group = config.training.tasks_per_step, int(getattr(config.algorithm, "group_size", 1))
    if tasks * group > MOST_EPISODES:
        yield (
            f"`training.tasks_per_step: {tasks}` with `algorithm.group_size: {group}` results in "
            f"{tasks * group:,} episodes per step. Set numbers that result in at most {MOST_EPISODES:,}."
        )
    if config.evaluation.problems > MOST_EPISODES and config.environment.size("test") is None:
        yield f"`evaluation.problems: {config.evaluation.problems}` is too large. Set at most {MOST_EPISODES:,}."


def check_judges(run: RunToCheck) -> Iterator[str]:
    """Yield a message for each test set that is judged by a model in this process."""
    for name, each in run.config.evaluation.sets.items():
        if offers(each, UsesModels) and each.frozen_models:
            yield (
                f"`evaluation.sets.{name}` is judged by '{each.frozen_models[0].path}', a model in this "
                "process. Use an endpoint as its judge."
            )


def check_prices(run: RunToCheck) -> Iterator[str]:
    """Yield a message for each price of an agent that does not exist."""
    known = [*run.team.names, "default"]
    for name in run.config.evaluation.prices:
        if name not in known:
            yield f"`evaluation.prices` contains '{name}', which is not an agent of the team.{did_you_mean(name, known)}"


CHECKS: tuple[Check, ...] = (check_judges, check_prices)
TRAINING_CHECKS: tuple[Check, ...] = (check_amount,)


class Timed(Settings):
    """Settings that every environment and every engine has."""

    timeout: Annotated[float, FREE] = Field(default=Patience.environment, gt=0, allow_inf_nan=False)
    """Seconds after which one call of the environment, or one request to the engine, is aborted; its episode then fails.
    Time in a queue (for the model, a connection, a sandbox) does not count, nor does time in which this process is
    stopped."""

    """Tasks (groups) per step; each has `algorithm.group_size` episodes."""


class EpisodeConfig(Settings):
    """Limits of an episode, and the processes of its environment."""

    timeout: Annotated[float, FREE] = Field(default=Patience.episode, gt=0, allow_inf_nan=False)
    """Seconds after its start at which an episode is aborted and fails."""
    environment_workers: Annotated[int, FREE] = Field(default=0, ge=0)
    """Number of processes for episode states, with their games, graders and sandboxes; 0 keeps them in this process. Results are
    bitwise identical."""
    compaction: CompactionConfig | None = None
    """How to shorten a conversation that no longer fits the context; with null, its episode fails."""
    share_thoughts: bool = False
    """Whether other agents and the environment receive whole completions; false removes thoughts (`<think>…</think>`)."""


class GraderConfig(Settings):
    """Limits of grading one text."""

    timeout: Annotated[float, FREE] = Field(default=Patience.grader, gt=0, allow_inf_nan=False)
    """Seconds after which grading is aborted and the episode fails. Time in a queue for a sandbox or a judge does not count."""


def timed(settings: type[Settings], section: str) -> type[Settings]:
    """Return settings with a `timeout` in addition to their own, with the default of an environment or an engine."""
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


class RunConfig(Settings):
    """Everything that a run depends on; the resolved settings are written next to its results."""

    name: str = "run"
    """The run's folder is `runs/NAME-TIME`, unless another folder is given."""
    description: Annotated[str, FREE] = ""
    """A description for people, which is shown with the run."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random draws: tasks, samples, initial weights of adapters and critics."""
    model: ModelConfig = ModelConfig()
    team: TeamConfig = TeamConfig()
    environment: Annotated[EnvironmentSettings, Plugged()]
    """Settings of the class that `environment.name` finds; see `setup.recipe.resolve`."""
    workflow: Annotated[WorkflowSettings, Plugged()]
    algorithm: Annotated[AlgorithmSettings, Plugged()]
    engine: Annotated[Section, Plugged()]
    """Settings of the rollout engine that `engine.name` finds; `local` by default."""
    train_engine: Annotated[Section, Plugged(), FROM_HERE_ON]
    """Settings of the train engine that `train_engine.name` finds; `torch` by default."""
    start_from: StartFrom = Field(default_factory=dict)
    """Agent, policy or `*` → the source of its initial weights: a run (`RUN`, `RUN@best`, `RUN@STEP`), a PEFT folder or a model; a
    single value applies to every trained policy."""
    warmup: WarmupConfig | None = None
    reward_model: RewardModelConfig | None = None
    optimizer: Annotated[OptimizerConfig, FROM_HERE_ON] = OptimizerConfig()
    episode: EpisodeConfig = EpisodeConfig()
    grader: GraderConfig = GraderConfig()
    training: TrainingConfig = TrainingConfig()
    tasks: TasksConfig = TasksConfig()
    league: LeagueConfig | None = None
    """Opponents of the learners; null means self-play."""
    entropy: EntropyConfig | None = None
    """An entropy bonus for single agents; null uses only the setting of the algorithm's loss."""
    evaluation: Annotated[EvaluationConfig, FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    trackers: Annotated[tuple[TrackerConfig, ...], FREE] = ()
    record: Annotated[RecordConfig, FREE] = RecordConfig()
    episodes: Annotated[EpisodesConfig, FREE] = EpisodesConfig()
    ray: Annotated[RayConfig, FROM_HERE_ON] = RayConfig()
    """The actors of `--launch ray`; ignored without it."""

    @property
    def patience(self) -> Patience:
        """The time limits of this run, in seconds."""
        return Patience(
            environment=float(getattr(self.environment, "timeout", Patience.environment)),
            episode=self.episode.timeout,
            engine=float(getattr(self.engine, "timeout", Patience.engine)),
            grader=self.grader.timeout,
        )
