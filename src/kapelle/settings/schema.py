"""Defines the settings of a run, which are frozen and strict.

A recipe is a YAML file with the structure of these settings. The `name` in the sections `algorithm`, `environment`,
`workflow`, `engine` and `train_engine` selects the class of the section. Files and overlays are read in
`setup/recipe.py`, and error messages are created in `settings/messages.py`. Checks that involve several settings are
next to each section (see `settings/checks.py`).
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
from kapelle.features.swarm.settings import SwarmConfig
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
"""The key in `start_from` that stands for every trained policy without an entry of its own."""


def by_agent(value: object) -> object:
    """Return `start_from` as a mapping. A single string applies to all trained policies."""
    return {EVERYONE: value} if isinstance(value, str) else value


StartFrom = Annotated[dict[str, str], BeforeValidator(by_agent)]


class CheckpointConfig(Settings):
    """Settings for when to save checkpoints and how many to keep."""

    every: int = Field(default=10, ge=1)
    """The number of training steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """The number of most recent checkpoints to keep."""
    best: str | None = None
    """The metric that selects the best checkpoint, for example `success` or `reward/solver`. The value is taken from
    evaluations, or from training steps if evaluations do not report the metric. The best checkpoint is kept in addition to the
    most recent checkpoints, and a checkpoint is saved after every evaluation with a new best value."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of the metric `best` is the best."""
    background: bool = False
    """Whether training continues while a checkpoint is written from a copy in main memory. Only one checkpoint is written at a
    time, and a checkpoint is valid as soon as it is complete."""


class EpisodesConfig(Settings):
    """Settings for how long recorded episodes are kept. Older episodes are deleted after a checkpoint, in whole files of up to 16 steps."""

    keep: int | None = Field(default=None, ge=1)
    """The number of most recent training steps whose episodes and traces are always kept. If null, all episodes and traces are kept."""
    keep_evaluations: int | None = Field(default=None, ge=1)
    """The number of most recent training steps for which the episodes of evaluations are always kept. If null, all episodes of
    evaluations are kept."""


class RecordConfig(Settings):
    """Settings for the data that a run records for inspection, in addition to the data that is needed to resume the run."""

    credit_episodes: int = Field(default=2, ge=0)
    """The number of episodes per step for which the advantage, credit, ratio and entropy of each token are recorded. The best
    and the worst episodes of the groups whose returns differ most are selected. If 0, no such data is recorded."""


class TrackerConfig(Settings):
    """Settings of an experiment tracker, which is used in addition to the files of the run directory."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str = "kapelle"
    """The name of the project in the tracker (in MLflow, the name of the experiment)."""
    offline: bool = True
    """Whether to keep all data on this machine, if the tracker supports offline use."""
    transcripts: int = Field(default=10, ge=0)
    """The number of steps between two tables that show the completions of a few episodes. If 0, no tables are sent."""


# -------- Placement on a Ray cluster (`kapelle train … --launch ray`).


class Resources(Settings):
    """The resources that Ray reserves for one actor. An actor may use more than it reserves."""

    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """The number of CPU cores, which is also the number of threads that torch uses (at least one)."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """The number of GPUs. With a fraction, several actors share a GPU. An actor sees only the GPUs that are assigned to it."""


class SamplingPool(Settings):
    """Settings of a pool of sampling workers that hold the models of only some agents."""

    agents: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(min_length=1)
    """The agents that use the models of this pool. Agents that share a model must belong to the same pool."""
    workers: int = Field(default=1, ge=1)
    """The number of sampling workers in the pool. Rollout workers are assigned to the sampling workers in turn."""
    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """The number of CPU cores of each sampling worker; see `Resources`."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """The number of GPUs of each sampling worker."""

    @property
    def takes(self) -> Resources:
        """The resources of each sampling worker."""
        return Resources(cpus=self.cpus, gpus=self.gpus)


class RayConfig(Settings):
    """Settings of the actors that `--launch ray` starts on a cluster, and of their resources."""

    address: str | None = None
    """The address of the Ray cluster (`auto` or `host:port`). If null, Ray is started on this machine for the duration of the run."""
    rollout_workers: int = Field(default=1, ge=0)
    """The number of actors that roll out episodes, distributed over the ranks of the trainer. If 0, the ranks of the trainer
    roll out the episodes themselves."""
    least_rollout_workers: int | None = Field(default=None, ge=1)
    """The number of rollout workers that must be ready before the run starts. The remaining workers join when the cluster has
    room, and may leave again. If null, the run waits for all rollout workers. The results are bitwise identical for any number
    of rollout workers."""
    trainer: Resources = Resources()
    """The resources of each rank of the trainer."""
    rollout: Resources = Resources()
    """The resources of each rollout worker."""
    scoring_workers: int = Field(default=0, ge=0)
    """The number of actors that compute scores with frozen models for all ranks. The frozen models are a verifier
    (`reward_model`), a teacher or an embedding model. If 0, the ranks of the trainer hold these models and compute the scores
    themselves."""
    scoring: Resources = Resources()
    """The resources of each scoring worker."""
    pools: dict[str, SamplingPool] = Field(default={})
    """Pools of sampling workers by name, for example `{big: {agents: [solver], workers: 2, gpus: 2}}`. The workers of a pool
    sample the turns of the agents in the pool. The rollout workers hold the models of all other agents."""
    environment: Resources = Resources()
    """The resources of each environment worker. The number of environment workers per sampling process is `episode.environment_workers`."""
    spread: bool = False
    """Whether to place actors on as many machines as possible. If false, actors are placed on as few machines as possible."""
    timeout: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """Maximum time in seconds until the cluster has room for all actors, and until each actor has started."""

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
    """Settings of the embedded model, a small model with the Qwen3 architecture that is initialised from a seed."""

    hidden: int = Field(default=128, ge=8)
    """The width of the residual stream."""
    layers: int = Field(default=4, ge=1)
    """The number of decoder blocks."""
    heads: int = Field(default=4, ge=1)
    """The number of attention heads per block."""
    kv_heads: int = Field(default=2, ge=1)
    """The number of key and value heads per block, which must divide `heads`."""
    intermediate: int = Field(default=384, ge=8)
    """The width of the hidden layer of the MLP."""
    context: int = Field(default=512, ge=16)
    """The maximum number of tokens in the context (one token is one byte of text)."""
    seed: int = 0
    """The seed of the initial weights."""
    sees: bool = False
    """Whether the model can read images. If true, the model has the architecture of Qwen2.5-VL, with a frozen, randomly
    initialised vision tower of two blocks."""

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
    """Settings of the base model of the team."""

    path: str = "embedded"
    """The base model, which is `embedded`, a local folder, a GGUF file, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    dtype: DType = "float32"
    """The data type of forward and backward passes, and of frozen weights. Trained weights are always stored in float32."""
    head_dtype: Literal["float32"] | None = None
    """The data type of the output head, or null for `dtype`. With `dtype: bfloat16`, a head in float32 reduces the difference
    between the log-probs of sampler and trainer (arXiv:2506.13585); see docs/models.md for its cost."""
    tf32: Annotated[bool, FROM_HERE_ON] = False
    """Whether CUDA computes float32 matrix products in TF32, which is several times as fast but has only 10 mantissa bits
    instead of 23. The setting has no effect on a CPU."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """The device of the model, for example `cpu`, `cuda` or `cuda:1`. If null, the device is `cuda` if it is available (`cpu`
    for the embedded model)."""
    quantization: Literal["nf4"] | None = None
    """The storage format of frozen pretrained base models. With `nf4`, each weight takes four bits; this requires CUDA and
    `kapelle[quantised]`, and completions are sampled with `transformers`."""
    routing: Literal["free", "replayed"] = "free"
    """How tokens are routed to the experts of a mixture of experts in training. With `replayed`, each token is routed to the
    experts that were chosen in sampling (R3, arXiv:2510.11370)."""
    router: Literal["frozen", "trained"] = "frozen"
    """Whether the routers of a mixture of experts are trained or frozen if all weights of the model are trained."""
    kernels: Annotated[Literal["auto", "plain"], FROM_HERE_ON] = "auto"
    """The kernels that are used on CUDA. With `auto`, kernels of torch and Triton are used if they pass a test at their first
    use. With `plain`, only plain torch operations are used."""
    chat_template: str | None = None
    """The chat template to use instead of the model's own template. The value is the path of a Jinja file, or `plain` for base
    models without a template (`User: …`, `Assistant: …`)."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the chat template for all agents that use this model, for example `{enable_thinking: false}`."""


class LoraConfig(Settings):
    """Settings of the size and the layers of the LoRA adapters; see `team.Lora`."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """The names of the layers that have adapters, or `all-linear` for all linear layers; see docs/models.md."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class SamplingConfig(Settings):
    """Settings of how agents sample in training; see `types.Sampling`."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    choices: Literal["legal"] | tuple[str, ...] | None = None
    """The strings to which every completion is constrained. With `legal`, each completion is one of the legal moves in turns
    for which the environment lists moves. A choice is written in the tokens that the model's tokeniser gives it."""
    regex: str | None = None
    """A regular expression that every completion must match as a whole, in Rust's syntax (without look-around and back-references)."""
    json_schema: dict[str, object] | None = None
    """A JSON schema that every completion must match."""
    grammar: str | None = None
    """A grammar that every completion must follow, in the Lark syntax of llguidance."""

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
        """The constraint on completions, or None if completions are free text."""
        if self.choices is not None:
            return Constraint.legal() if self.choices == "legal" else Constraint.choices(self.choices)
        if self.regex is not None:
            return Constraint.regex(self.regex)
        if self.json_schema is not None:
            return Constraint.json_schema(self.json_schema)
        return None if self.grammar is None else Constraint.grammar(self.grammar)

    def build(self) -> Sampling:
        """Build the sampling parameters of an agent."""
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, self.constraint)


Schedule = Literal["constant", "linear", "cosine"]


class RateConfig(Settings):
    """Settings of the learning rates of an agent's policy and critic. If a rate is null, the value in the section `optimizer` is used."""

    lr: float | None = Field(default=None, gt=0)
    critic_lr: float | None = Field(default=None, gt=0)
    schedule: Schedule | None = None
    warmup_steps: int | None = Field(default=None, ge=0)


class ExampleConfig(Settings):
    """A user message and the agent's response to it, which are shown in the agent's prompt as an example."""

    user: str
    """The user message before the response."""
    assistant: str
    """The response of the agent."""


class AgentConfig(Settings):
    """Settings of an agent: its prompts, its weights, and how it samples."""

    name: str = Field(pattern=NAME)
    weights: Weights | None = None
    """The weights of the agent. If null, `team.sharing` determines the weights."""
    lora: LoraConfig | None = None
    """The adapter settings of the agent. If null, `team.lora` is used."""
    system: str | None = None
    prompt: str | None = None
    sampling: SamplingConfig | None = None
    """The sampling settings of the agent. If null, `team.sampling` is used."""
    examples: tuple[ExampleConfig, ...] = ()
    """The few-shot examples, in the order in which they appear in the prompt before the task."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the chat template of the agent's model. These arguments take precedence over the arguments in the section `model`."""
    share_critic_with: str | int | None = None
    """The name or the index (from 0) of the agent whose critic this agent shares."""
    optimizer: Annotated[RateConfig | None, FROM_HERE_ON] = None
    """The learning rates of the agent. If null, the section `optimizer` is used."""


class TeamConfig(Settings):
    """Settings of the team: its agents and how they share weights."""

    sharing: Literal["shared", "lora", "frozen"] = "lora"
    """How the agents share weights. With `shared`, all agents use one set of fully trained weights. With `lora`, each agent has
    its own adapter. With `frozen`, no policy is trained."""
    lora: LoraConfig = LoraConfig()
    sampling: SamplingConfig = SamplingConfig()
    agents: int | tuple[AgentConfig, ...] = 1
    """The agents in order, or the number of identical agents (named `agent_0`, `agent_1`, …)."""
    critic_lora: LoraConfig = LoraConfig()
    critic_sharing: Literal["own", "shared"] | None = None
    """Whether each agent has its own critic or all agents share one. If null, the algorithm chooses between local critics per
    agent and one central critic."""
    critic_model: str | None = None
    """The base model of the critics and of the verifier (`reward_model`): a folder or a name on a hub, of any model family. The
    critics and the verifier tokenise the text with the tokeniser of this model. If null, each agent's own model is used."""
    critic_train: Literal["lora", "full", "head"] = "lora"
    """The weights of the critics that are trained: an adapter (`critic_lora`), all weights of a copy of the model, or only the head."""
    critic_dtype: DType | None = None
    """The data type of the critics and of the verifier. If this setting or `critic_device` is set, the critics and the verifier
    use their own copy of the base model."""
    critic_device: Annotated[str | None, FROM_HERE_ON] = None
    """The device of the critics and of the verifier; see `critic_dtype`."""


class OptimizerConfig(Settings):
    """Settings of the optimiser, AdamW (arXiv:1711.05101). Each policy has its own instance."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """The variant of AdamW. The 8-bit variants store the moments in one byte each (arXiv:2110.02861), support full weights on
    CUDA, and require `kapelle[quantised]`."""
    lr: float = Field(default=1e-5, gt=0)
    """The learning rate of the policies. For full weights, the rate is usually a tenth of that for adapters."""
    critic_lr: float | None = Field(default=None, gt=0)
    """The learning rate of the critics. If null, `lr` is used."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The decay rates of the two moment estimates."""
    eps: float = Field(default=1e-8, gt=0)
    """A constant that is added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The coefficient of decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The maximum norm to which the gradient of each policy is clipped separately. If null, gradients are not clipped."""
    schedule: Schedule = "constant"
    """The schedule of the learning rate from the end of the warmup to the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """The number of optimiser steps over which the learning rate increases. The rate is 0 at the first step, as in
    transformers, TRL and verl."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """The warmup steps as a share of all optimiser steps, rounded up. This setting is intended for runs whose length is set by
    `training.epochs`."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_share:
            raise ValueError("`warmup_steps` and `warmup_share` cannot be combined; remove one")
        return self

    def rising(self, total: int) -> int:
        """Return the number of warmup steps for a run of `total` optimiser steps."""
        return ceil(self.warmup_share * total) if self.warmup_share else self.warmup_steps


class AmountConfig(Settings):
    """Settings of the amount of training."""

    steps: Annotated[int, FREE] = Field(default=50, ge=0)
    """The number of training steps. Schedules (`optimizer.schedule`, `loss.entropy_end`) reach their final value at the last step."""
    epochs: Annotated[float | None, FREE] = Field(default=None, gt=0, allow_inf_nan=False)
    """The number of passes over all training tasks, from which `steps` is computed. The last step is filled with tasks of the
    next epoch. If null, `steps` is used."""
    critic_warmup: int = Field(default=0, ge=0)
    """The number of steps at the start of training in which only the critics are trained (for `vdn` and `qmix`, the utilities
    and the mixer)."""
    tasks_per_step: int = Field(default=32, ge=1)
    """The number of tasks (groups) per step. Each task has `algorithm.group_size` episodes."""


class TrainingConfig(AheadSettings, AmountConfig):
    """Settings for how much to train, when episodes are collected, and when to stop."""

    microbatch_tokens: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], FROM_HERE_ON] = "auto"
    """The maximum number of tokens in one forward and backward pass. The results of training do not depend on this setting. The
    value `auto` means 4096 on a CPU. On a GPU, `auto` means the number of tokens that fits into memory, measured at the first
    pass."""
    gradient_checkpointing: Annotated[bool, FROM_HERE_ON] = False
    """Whether to store only the input of each decoder block and recompute the block in the backward pass. The gradients are the
    same and less memory is used, but an update takes about 1.5 times as long."""
    max_failed_share: Annotated[float, FREE] = Field(default=0.2, ge=0.0, le=1.0)
    """The maximum share of failed episodes in a step. If a larger share fails, the run stops."""
    parity_tolerance: Annotated[float | None, FREE] = Field(default=None, gt=0)
    """The maximum absolute difference between the log-probs of the trainer and of the sampler, in nats. In half precision, a
    few tokens may exceed the maximum. If null, the maximum is 1e-4 in float32, 0.25 in bfloat16 and 0.1 in float16."""
    non_finite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """Whether to stop the run or to skip the step if a loss or gradient is not finite."""


class TasksConfig(Settings):
    """Settings that select the tasks of the environment."""

    max_prompt_tokens: Annotated[int, Field(ge=1)] | Literal["context"] | None = None
    """The maximum number of tokens of an agent's first prompt. Tasks with a longer first prompt are excluded from training and
    evaluation. The value `context` means the size of the model's context minus the agent's `max_tokens`. If null, no tasks are
    excluded, and an error is raised if one of the first tasks does not fit the model."""
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
    """Settings of one of the sets in `evaluation.sets`. If a field is null, the value in `evaluation` is used."""

    samples: int | None = Field(default=None, ge=1)
    """The number of answers to each problem of the set."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The sampling temperature of all agents in this set."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """The minimum total probability of the tokens that are kept in nucleus sampling."""
    top_k: int | None = Field(default=None, ge=0)
    """The number of most likely tokens that are kept in top-k sampling. If 0, all tokens are kept."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The maximum number of tokens of an answer."""


class EvaluationConfig(Settings):
    """Settings for evaluating the team on held-out problems, which are always taken from the `test` split."""

    problems: int = Field(default=500, ge=1)
    """The number of problems in the evaluations before and after training."""
    every: int = Field(default=0, ge=0)
    """The number of training steps between evaluations. If 0, the team is evaluated only before and after training."""
    problems_while_training: int = Field(default=100, ge=1)
    """The number of problems in an evaluation during training."""
    greedy: bool = True
    """Whether agents always choose the most likely token. If false, agents sample as in training."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The sampling temperature of all agents, which takes precedence over `greedy`. If null, `greedy` applies."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """The minimum total probability of the tokens that are kept in nucleus sampling. If null, the value of training is used."""
    top_k: int | None = Field(default=None, ge=0)
    """The number of most likely tokens that are kept in top-k sampling. If 0, all tokens are kept; if null, the value of
    training is used."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The maximum number of tokens of an answer. If null, the value of training is used."""
    samples: int = Field(default=1, ge=1)
    """The number of answers to each problem. If there are several answers, they are sampled. With several answers, success is
    the mean over answers and problems (avg@k). The metrics pass@k (arXiv:2107.03374) and, if answers can be compared, maj@k
    (arXiv:2203.11171) are also reported."""
    sets: dict[str, TestSet] = Field(default={})
    """Additional sets of problems, by name. The value is the settings of an environment that has this test split, for example
    `{aime: {name: math, …}}`. The success rates of each set are reported separately. A problem that also occurs in the training
    rows raises an error."""
    for_set: dict[str, SetConfig] = Field(default={})
    """Settings of individual sets, by the name of the set, for example `{aime: {samples: 32, temperature: 0.6}}`."""
    prices: dict[
        str,
        tuple[
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
        ],
    ] = Field(default={})
    """The price of a million prompt tokens and of a million completion tokens, by agent. The key `default` applies to all other agents."""
    before_and_after: bool = True
    """Whether to evaluate the team on `problems` problems before the first step and after the last step."""

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
        """Return the evaluation settings of the set with the given name."""
        own = self.for_set.get(name, SetConfig())
        given = {key: value for key, value in own.model_dump().items() if value is not None}
        return self.model_copy(update=given)


MOST_EPISODES = 1_000_000
"""The maximum number of episodes of a step or an evaluation, all of which are in memory at the same time."""


def check_amount(run: RunToCheck) -> Iterator[str]:
    """Yield a message for each setting that requires more episodes than fit into memory."""
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
    """Yield a message for each price that is set for an agent that does not exist."""
    known = [*run.team.names, "default"]
    for name in run.config.evaluation.prices:
        if name not in known:
            yield f"`evaluation.prices` contains '{name}', which is not an agent of the team.{did_you_mean(name, known)}"


CHECKS: tuple[Check, ...] = (check_judges, check_prices)
TRAINING_CHECKS: tuple[Check, ...] = (check_amount,)


class Timed(Settings):
    """Settings that every environment and every engine has."""

    timeout: Annotated[float, FREE] = Field(default=Patience.environment, gt=0, allow_inf_nan=False)
    """Maximum time in seconds of one call of the environment or one request to the engine. After this time, the call is aborted
    and its episode fails. Time spent in a queue (for the model, a connection or a sandbox) does not count, nor does time during
    which this process is stopped."""


class EpisodeConfig(Settings):
    """Settings of the limits of an episode and of the environment's processes."""

    timeout: Annotated[float, FREE] = Field(default=Patience.episode, gt=0, allow_inf_nan=False)
    """Maximum time in seconds from the start of an episode. After this time, the episode is aborted and fails."""
    environment_workers: Annotated[int, FREE] = Field(default=0, ge=0)
    """The number of processes for episode states, including their games, graders and sandboxes. If 0, episode states are kept
    in this process. The results are bitwise identical for any number of environment processes."""
    compaction: CompactionConfig | None = None
    """How to shorten a conversation that no longer fits into the context. If null, the episode fails."""
    share_thoughts: bool = False
    """Whether other agents and the environment receive whole completions. If false, thoughts (`<think>…</think>`) are removed."""


class GraderConfig(Settings):
    """Settings of the limits for grading one string."""

    timeout: Annotated[float, FREE] = Field(default=Patience.grader, gt=0, allow_inf_nan=False)
    """Maximum time in seconds for grading. After this time, grading is aborted and the episode fails. Time spent in a queue for
    a sandbox or a judge does not count."""


def timed(settings: type[Settings], section: str) -> type[Settings]:
    """Return a settings class with the additional field `timeout`, whose default is that of an environment or an engine."""
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
    """All settings of a run. The resolved settings are written next to the results of the run."""

    name: str = "run"
    """The name of the run. The folder of the run is `runs/NAME-TIME`, unless another folder is given."""
    description: Annotated[str, FREE] = ""
    """A description of the run for human readers, which is shown with the run."""
    seed: int = Field(default=0, ge=0)
    """The seed of all random numbers: tasks, samples, and the initial weights of adapters and critics."""
    model: ModelConfig = ModelConfig()
    team: TeamConfig = TeamConfig()
    environment: Annotated[EnvironmentSettings, Plugged()]
    """The settings of the environment class that `environment.name` selects; see `setup.recipe.resolve`."""
    workflow: Annotated[WorkflowSettings, Plugged()]
    algorithm: Annotated[AlgorithmSettings, Plugged()]
    engine: Annotated[Section, Plugged()]
    """The settings of the rollout engine that `engine.name` selects. The default is `local`."""
    train_engine: Annotated[Section, Plugged(), FROM_HERE_ON]
    """The settings of the train engine that `train_engine.name` selects. The default is `torch`."""
    start_from: StartFrom = Field(default_factory=dict)
    """The sources of initial weights, by agent, by policy, or `*` for all. A source is a run (`RUN`, `RUN@best`, `RUN@STEP`), a
    PEFT folder or a model. A single value applies to every trained policy."""
    warmup: WarmupConfig | None = None
    reward_model: RewardModelConfig | None = None
    optimizer: Annotated[OptimizerConfig, FROM_HERE_ON] = OptimizerConfig()
    episode: EpisodeConfig = EpisodeConfig()
    grader: GraderConfig = GraderConfig()
    training: TrainingConfig = TrainingConfig()
    tasks: TasksConfig = TasksConfig()
    league: LeagueConfig | None = None
    """The opponents of the learners. If null, training uses self-play."""
    entropy: EntropyConfig | None = None
    """An entropy bonus for individual agents. If null, only the entropy setting of the algorithm's loss is used."""
    swarm: SwarmConfig | None = None
    """Rewards for calling other agents in parallel, for example in the workflow `swarm`."""
    evaluation: Annotated[EvaluationConfig, FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    trackers: Annotated[tuple[TrackerConfig, ...], FREE] = ()
    record: Annotated[RecordConfig, FREE] = RecordConfig()
    episodes: Annotated[EpisodesConfig, FREE] = EpisodesConfig()
    ray: Annotated[RayConfig, FROM_HERE_ON] = RayConfig()
    """Settings of the actors of `--launch ray`. The section is ignored without `--launch ray`."""

    @property
    def patience(self) -> Patience:
        """The time limits of this run in seconds."""
        return Patience(
            environment=float(getattr(self.environment, "timeout", Patience.environment)),
            episode=self.episode.timeout,
            engine=float(getattr(self.engine, "timeout", Patience.engine)),
            grader=self.grader.timeout,
        )
