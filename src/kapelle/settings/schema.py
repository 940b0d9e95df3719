"""The settings of a run: frozen, strict, and each declared in one place.

A recipe is YAML of this shape. The sections `algorithm`, `environment`, `workflow`, `engine` and `train_engine` are
settings of the class that their `name` finds. Reading files and overlays live in `setup/recipe.py`, error texts in
`settings/messages.py`; `setup/validation.py` checks which combinations make sense.
"""

from __future__ import annotations

import re
from copy import copy
from functools import lru_cache, partial
from math import ceil
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator

from kapelle.features.ahead.settings import AheadSettings
from kapelle.features.compaction.settings import CompactionConfig
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

# -------- What a run keeps: checkpoints, episodes, credit of tokens, trackers.

EVERYONE = "*"
"""In `start_from`: every policy that is trained and has no entry of its own."""


def by_agent(value: object) -> object:
    """Return `start_from` as a mapping where one folder is named for all."""
    return {EVERYONE: value} if isinstance(value, str) else value


StartFrom = Annotated[dict[str, str], BeforeValidator(by_agent)]


class CheckpointConfig(Settings):
    """When to save checkpoints and how many to keep."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    best: str | None = None
    """Metric of evaluations, or else of steps, whose best checkpoint is kept beside the newest: `success`, `reward/solver`. One is
    saved after every evaluation that is better than all before."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the best value of `best` is the highest or the lowest."""
    background: bool = False
    """Whether the next steps are taken while a checkpoint is written, from a copy in the machine's memory. One is written at a
    time; it counts when it is sealed."""


class EpisodesConfig(Settings):
    """How long recorded episodes are kept; older ones are deleted after a checkpoint, in whole files of up to 16 steps."""

    keep: int | None = Field(default=None, ge=1)
    """Newest training steps whose episodes and traces are kept for certain; null keeps all."""
    keep_evaluations: int | None = Field(default=None, ge=1)
    """Newest training steps whose evaluations' episodes are kept for certain; null keeps all."""


class RecordConfig(Settings):
    """What a run records for people who look at it, beside what it needs itself."""

    credit_episodes: int = Field(default=2, ge=0)
    """Episodes per step of which each token's advantage, credit, ratio and entropy are kept: the best and the worst of the
    groups whose returns differ most. 0 keeps none."""


class TrackerConfig(Settings):
    """A tracker in addition to the files of the run directory."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str = "kapelle"
    """Name of the project, or of MLflow's experiment."""
    offline: bool = True
    """Keep everything on this machine, where the tracker can."""
    transcripts: int = Field(default=10, ge=0)
    """Steps between two tables of what a few episodes' agents said; 0 sends none."""


# -------- A cluster that Ray places a run on (`kapelle train … --launch ray`).


class Resources(Settings):
    """What one actor takes of a machine; Ray counts it, and keeps nobody from using more."""

    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Cores; also the number of threads that torch uses, at least one."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """GPUs; a share of one lets actors live on the same GPU. An actor sees no others."""


class SamplingPool(Settings):
    """Sampling workers that hold the models of some agents, and nothing else."""

    agents: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(min_length=1)
    """The agents whose models they hold; those that share a model are named together."""
    workers: int = Field(default=1, ge=1)
    """How many there are; rollout workers are dealt to them in turn."""
    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Cores of each; see `Resources`."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """GPUs of each."""

    @property
    def takes(self) -> Resources:
        """What each of its workers takes."""
        return Resources(cpus=self.cpus, gpus=self.gpus)


class RayConfig(Settings):
    """What `--launch ray` places on a cluster, and what each of it takes."""

    address: str | None = None
    """The cluster's address (`auto`, or `host:port`); null starts a Ray of its own on this machine, which ends with the run."""
    rollout_workers: int = Field(default=1, ge=0)
    """Actors that play episodes, shared out over the ranks of the trainer; 0 lets the ranks play, as without Ray."""
    least_rollout_workers: int | None = Field(default=None, ge=1)
    """Rollout workers that the run waits for; the others join whenever the cluster has room for them, and may leave. null waits
    for all. The run is the same, to the bit, whichever are there."""
    trainer: Resources = Resources()
    """What each rank of the trainer takes."""
    rollout: Resources = Resources()
    """What each rollout worker takes."""
    scoring_workers: int = Field(default=0, ge=0)
    """Actors that hold what is only scored, a verifier that pays (`reward_model`) or teaches, a teacher, an embedding model, and score
    for all ranks; 0 lets the ranks hold it and score, as without Ray."""
    scoring: Resources = Resources()
    """What each scoring worker takes."""
    pools: dict[str, SamplingPool] = Field(default={})
    """Name → a pool of sampling workers: `{big: {agents: [solver], workers: 2, gpus: 2}}`. Rollout workers ask them for these agents'
    turns, and hold the models of all other agents."""
    environment: Resources = Resources()
    """What each environment worker takes; `episode.environment_workers` says how many each process that plays has."""
    spread: bool = False
    """Whether actors are put on as many machines as possible; otherwise on as few."""
    timeout: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """Seconds that the cluster has to find room for all of them, and each actor to start."""

    @field_validator("pools")
    @classmethod
    def _named(cls, value: dict[str, SamplingPool]) -> dict[str, SamplingPool]:
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"the name '{name}' does not fit: letters, digits and _ make one")
        return value

    @model_validator(mode="after")
    def _asked(self) -> RayConfig:
        if self.pools and not self.rollout_workers:
            raise ValueError(
                "`ray.pools` hold models for rollout workers, but `ray.rollout_workers` is 0. Set it to 1 or more, or leave the pools out"
            )
        return self


class EmbeddedConfig(Settings):
    """Size of the model that kapelle makes itself: the Qwen3 architecture, initialised from a seed."""

    hidden: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(default=4, ge=1)
    """Decoder blocks."""
    heads: int = Field(default=4, ge=1)
    """Attention heads of a block."""
    kv_heads: int = Field(default=2, ge=1)
    """Heads of keys and values; divides `heads`."""
    intermediate: int = Field(default=384, ge=8)
    """Width of the MLP."""
    context: int = Field(default=512, ge=16)
    """Most tokens (bytes of text) that it reads."""
    seed: int = 0
    """Of the initial weights."""
    sees: bool = False
    """Whether it sees images: the architecture of Qwen2.5-VL, with a vision tower of two blocks, frozen as it is drawn."""

    @model_validator(mode="after")
    def _fitting(self) -> EmbeddedConfig:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`kv_heads: {self.kv_heads}` does not divide `heads: {self.heads}`. Set a number that does, such as 1"
            )
        width = self.hidden // self.heads
        if width < 2 or width % 2 or (self.sees and self.hidden % self.heads):
            raise ValueError(
                f"`hidden: {self.hidden}` leaves {width} numbers to each of {self.heads} heads, and positions turn them in pairs. Set "
                f"`hidden` to a multiple of {2 * self.heads}, or other `heads`"
            )
        return self


class ModelConfig(Settings):
    """The team's base model."""

    path: str = "embedded"
    """`embedded` (made here), a local folder, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    embedded: EmbeddedConfig = EmbeddedConfig()
    dtype: DType = "float32"
    """Compute type of forward and backward, in which frozen weights are held; what trains is held in float32."""
    tf32: Annotated[bool, FROM_HERE_ON] = False
    """Whether CUDA computes products of float32 in TF32, several times as fast and with the ten bits that float16 keeps of a
    number. False keeps all 23; a CPU always does."""
    device: Annotated[str | None, FROM_HERE_ON] = None
    """`cpu`, `cuda`, `cuda:1`, …; None is `cuda` where there is one (`cpu` for the embedded model)."""
    quantization: Literal["nf4"] | None = None
    """Frozen pretrained bases in four bits a weight, on CUDA, by `kapelle[quantised]`; sampled by `transformers`."""
    routing: Literal["free", "replayed"] = "free"
    """`replayed`: sampling records which experts of a mixture each token takes, and training takes them again (R3, 2510.11370)."""
    router: Literal["frozen", "trained"] = "frozen"
    """Whether all weights of a mixture of experts include its routers, where all weights train."""
    kernels: Annotated[Literal["auto", "plain"], FROM_HERE_ON] = "auto"
    """On CUDA, `auto` takes kernels of torch and Triton that pass a trial at their first use; `plain` takes torch's plain operations."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `{enable_thinking: false}`, for all agents on this model."""


class LoraConfig(Settings):
    """Size and place of the adapters; see `team.Lora`."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of layers, or `all-linear`; docs/models.md says which those are."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class SamplingConfig(Settings):
    """How agents sample while they learn; see `types.Sampling`."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    choices: Literal["legal"] | tuple[str, ...] | None = None
    """Every completion is one of these texts. `legal`: one of the moves that the environment lists for the agent when it is to move, so that
    none is invalid; elsewhere it says what it likes."""
    regex: str | None = None
    """Every completion matches this whole regular expression (Rust's syntax: no look-around, no back-references)."""
    json_schema: dict[str, object] | None = None
    """Every completion is JSON that this schema describes."""
    grammar: str | None = None
    """Every completion is a text of this grammar, in llguidance's form of Lark."""

    @model_validator(mode="after")
    def _one_form(self) -> SamplingConfig:
        forms = {
            "choices": self.choices,
            "regex": self.regex,
            "json_schema": self.json_schema,
            "grammar": self.grammar,
        }
        given = [form for form, said in forms.items() if said is not None]
        if len(given) > 1:
            raise ValueError(
                f"a completion has one form, and `{given[0]}` and `{given[1]}` are set: leave one out"
            )
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What a completion has to look like; None where it is free."""
        if self.choices is not None:
            return Constraint.legal() if self.choices == "legal" else Constraint.choices(self.choices)
        if self.regex is not None:
            return Constraint.regex(self.regex)
        if self.json_schema is not None:
            return Constraint.json_schema(self.json_schema)
        return None if self.grammar is None else Constraint.grammar(self.grammar)

    def build(self) -> Sampling:
        """Return how an agent samples."""
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, self.constraint)


Schedule = Literal["constant", "linear", "cosine"]


class RateConfig(Settings):
    """The learning rates of what acts for an agent, and of its critic; null is that of the section `optimizer`."""

    lr: float | None = Field(default=None, gt=0)
    critic_lr: float | None = Field(default=None, gt=0)
    schedule: Schedule | None = None
    warmup_steps: int | None = Field(default=None, ge=0)


class AgentConfig(Settings):
    """One agent: its prompts, which weights act for it, how it samples."""

    name: str = Field(pattern=NAME)
    weights: Weights | None = None
    """None uses `team.sharing`."""
    lora: LoraConfig | None = None
    """None uses `team.lora`."""
    system: str | None = None
    prompt: str | None = None
    sampling: SamplingConfig | None = None
    """None uses `team.sampling`."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of its model's chat template, over those of the section `model`."""
    share_critic_with: str | int | None = None
    """Name or seat number (from 0) of the agent whose critic this one uses too."""
    optimizer: Annotated[RateConfig | None, FROM_HERE_ON] = None
    """None uses the section `optimizer`."""


class TeamConfig(Settings):
    """The team: agents and how they share weights."""

    sharing: Literal["shared", "lora", "frozen"] = "lora"
    """`shared`: one set of full weights; `lora`: one adapter per agent; `frozen`: nothing trains."""
    lora: LoraConfig = LoraConfig()
    sampling: SamplingConfig = SamplingConfig()
    agents: int | tuple[AgentConfig, ...] = 1
    """The agents in seat order, or the number of identical ones (`agent_0`, `agent_1`, …)."""
    critic_lora: LoraConfig = LoraConfig()
    critic_sharing: Literal["own", "shared"] | None = None
    """None uses the algorithm's choice: own critics where they are local, a shared one where it is central."""
    critic_model: str | None = None
    """The model that critics stand on, and a verifier that pays: a folder or a name on a hub, of any family. Critics then read in its
    own tokens. Null is each agent's own model."""
    critic_train: Literal["lora", "full", "head"] = "lora"
    """What critics train of their model: an adapter (`critic_lora`), all weights of a copy of their own, or nothing but the head."""
    critic_dtype: DType | None = None
    """With this or `critic_device`, critics and a verifier that pays stand on a copy of their base of that kind."""
    critic_device: Annotated[str | None, FROM_HERE_ON] = None
    """See `critic_dtype`."""


class OptimizerConfig(Settings):
    """AdamW (1711.05101), one instance per policy."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """The 8-bit ones hold moments in one byte (2110.02861), for full weights on CUDA; they need `kapelle[quantised]`."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate; full weights usually take a tenth of what adapters do."""
    critic_lr: float | None = Field(default=None, gt=0)
    """None uses `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Norm to which the gradient of each policy is clipped separately; null turns clipping off."""
    schedule: Schedule = "constant"
    """How the rate goes on after `warmup_steps`, until the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises from 0, at which the first is taken, as in transformers, TRL and verl."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all optimiser steps, whose number `training.epochs` may leave open; rounded up."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                "`warmup_steps` and `warmup_share` both say how long the rate rises; leave one out"
            )
        return self

    def rising(self, total: int) -> int:
        """Return the steps over which the rate rises, of so many in all."""
        return ceil(self.warmup_share * total) if self.warmup_share else self.warmup_steps


class AmountConfig(Settings):
    """How much to train."""

    steps: Annotated[int, FREE] = Field(default=50, ge=0)
    """A learning rate or a bonus that ends with them (`optimizer.schedule`, `loss.entropy_end`) ends with the number given last."""
    epochs: Annotated[float | None, FREE] = Field(default=None, gt=0, allow_inf_nan=False)
    """How often all tasks of training are played, in place of `steps`, which is then computed from it: the last step is filled up with
    tasks of the next epoch. Null goes by `steps`."""
    critic_warmup: int = Field(default=0, ge=0)
    """The first steps, in which only critics learn, or the utilities and mixer of `vdn` and `qmix`; policies play as they are."""
    tasks_per_step: int = Field(default=32, ge=1)
    """Tasks (groups) per step; each one is played `algorithm.group_size` times."""


class TrainingConfig(AheadSettings, AmountConfig):
    """How much to train, when episodes are collected, and when to stop."""

    microbatch_tokens: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], FROM_HERE_ON] = "auto"
    """Maximum tokens in one forward and backward pass; the result does not depend on it. `auto` is 4096 on a CPU, and on a GPU
    what fits in its memory when the first pass begins."""
    gradient_checkpointing: Annotated[bool, FROM_HERE_ON] = False
    """True keeps of each decoder block its input alone and computes the block again in the backward pass: the same
    gradients, less memory, and an update that takes about half as long again."""
    max_failed_share: Annotated[float, FREE] = Field(default=0.2, ge=0.0, le=1.0)
    """The run stops when a larger share of a step's episodes fails."""
    parity_tolerance: Annotated[float | None, FREE] = Field(default=None, gt=0)
    """Largest |trainer − sampler| log-prob (nats), in half precision of all but a few tokens; None uses 1e-4 in float32, 0.25 in
    bfloat16 and 0.1 in float16."""
    non_finite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """What happens to a step whose loss or gradient is not finite."""


class DifficultyConfig(Settings):
    """Tasks of a finite train split by how often the team solves them, measured with its first weights before the first step."""

    low: float = Field(default=0.0, ge=0.0, le=1.0)
    """Tasks that are solved less often are left out."""
    high: float = Field(default=1.0, ge=0.0, le=1.0)
    """Tasks that are solved more often are left out."""
    samples: int = Field(default=4, ge=1)
    """Answers to each task, sampled as in training."""

    @model_validator(mode="after")
    def _ordered(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"`low: {self.low}` is above `high: {self.high}`, which leaves no task")
        return self


class CurriculumConfig(Settings):
    """Easy tasks first: each step draws from the easiest share, which grows until all tasks take part."""

    by: str = "solve_rate"
    """What says how hard a task is: `solve_rate`, as `tasks.difficulty` measures it; or a field of the tasks' data that is a number,
    or ends in one (`Level 3`), the larger the harder."""
    start: float = Field(default=0.25, gt=0.0, le=1.0)
    """Share of the tasks that the first step draws from."""
    steps: int = Field(default=100, ge=1)
    """Steps until all tasks take part; the share grows evenly."""


class TasksConfig(Settings):
    """Which of the environment's tasks are played."""

    max_prompt_tokens: Annotated[int, Field(ge=1)] | Literal["context"] | None = None
    """Most tokens of an agent's first prompt: tasks with a longer one are left out of training and of evaluations. `context` is what
    the model reads less the agent's `max_tokens`. Null leaves none out, and refuses a run whose first tasks do not fit the model."""
    difficulty: DifficultyConfig | None = None
    curriculum: CurriculumConfig | None = None
    replay: ReplayConfig | None = None


TestSet = Annotated[
    EnvironmentSettings,
    Plugged(),
    BeforeValidator(partial(named_settings, missing="it names no environment: write `{name: math, …}`")),
]


class SetConfig(Settings):
    """What a set of `evaluation.sets` has of its own; null is as in the whole evaluation."""

    samples: int | None = Field(default=None, ge=1)
    """Answers to each of its problems."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """At which all agents answer it."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Least probability that the kept tokens have together."""
    top_k: int | None = Field(default=None, ge=0)
    """How many of the likeliest tokens are kept; 0 keeps all."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer."""


class EvaluationConfig(Settings):
    """How the team is evaluated on held-out problems, always of the `test` split."""

    problems: int = Field(default=500, ge=1)
    """Problems of an evaluation before and after training."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations during training; 0 evaluates only before and after."""
    problems_while_training: int = Field(default=100, ge=1)
    """Problems of an evaluation in between."""
    greedy: bool = True
    """False samples as in training."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """At which all agents answer, in place of what `greedy` says; as training does, where null."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Least probability that the kept tokens have together, where agents are sampled; null is as in training."""
    top_k: int | None = Field(default=None, ge=0)
    """How many of the likeliest tokens are kept, where agents are sampled; 0 keeps all, null is as in training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; null is as in training."""
    samples: int = Field(default=1, ge=1)
    """Answers to each problem, sampled where there are several. The success is then the mean over problems (avg@k);
    pass@k (2107.03374) and, where answers can be compared, maj@k (2203.11171) stand beside it."""
    sets: dict[str, TestSet] = Field(default={})
    """Further sets of problems, each by a name and the settings of the environment whose test split it is: `{aime: {name: math, …}}`.
    Each has rates of its own beside those of the run's environment; a problem that is trained on too is refused."""
    for_set: dict[str, SetConfig] = Field(default={})
    """What sets have of their own, by the set's name: `{aime: {samples: 32, temperature: 0.6}}`."""
    prices: dict[
        str,
        tuple[
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
            Annotated[float, Field(ge=0.0, allow_inf_nan=False)],
        ],
    ] = Field(default={})
    """What a million tokens cost that an agent reads, and that it writes, by agent; `default` is for those without a name here."""
    before_and_after: bool = True
    """Whether `problems` are played before the first and after the last step."""

    @field_validator("sets")
    @classmethod
    def _named(cls, value: dict[str, object]) -> dict[str, object]:
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"the name '{name}' does not fit: letters, digits and _ make one")
        return value

    @model_validator(mode="after")
    def _several_differ(self) -> EvaluationConfig:
        unknown = [name for name in self.for_set if name not in self.sets]
        if unknown:
            raise ValueError(
                f"`for_set` names '{unknown[0]}', which is none of `sets`: {', '.join(self.sets) or 'there is none'}"
            )
        for name, own in {"": self, **{name: self.of_set(name) for name in self.for_set}}.items():
            if own.samples > 1 and own.always_greedy:
                raise ValueError(
                    f"`{f'for_set.{name}.' if name else ''}samples: {own.samples}` answers to a problem would all be the same; set "
                    "`evaluation.greedy: false` or a `temperature` too"
                )
        return self

    @property
    def always_greedy(self) -> bool:
        """Whether agents choose the likeliest token each time."""
        return self.greedy if self.temperature is None else not self.temperature

    def of_set(self, name: str) -> EvaluationConfig:
        """Return how the problems of a set are played."""
        own = self.for_set.get(name, SetConfig())
        given = {key: value for key, value in own.model_dump().items() if value is not None}
        return self.model_copy(update=given)


class Timed(Settings):
    """What every environment and every engine has in addition to its own settings."""

    timeout: Annotated[float, FREE] = Field(default=Patience.environment, gt=0, allow_inf_nan=False)
    """Seconds after which one call of the environment, or one request to the engine, is given up; its episode then
    fails. Time spent queueing (for the model, a connection, a sandbox) does not count, nor does time in which this
    process is stopped."""


class EpisodeConfig(Settings):
    """Limits of an episode, and where its world lives."""

    timeout: Annotated[float, FREE] = Field(default=Patience.episode, gt=0, allow_inf_nan=False)
    """Seconds after which it is given up and fails, counted from its start."""
    environment_workers: Annotated[int, FREE] = Field(default=0, ge=0)
    """Processes in which worlds live, with their games, graders and sandboxes; 0 keeps them in this one. The results
    are the same, to the bit."""
    compaction: CompactionConfig | None = None
    """What is kept of a conversation that no longer fits; null lets its episode fail."""
    share_thoughts: bool = False
    """True passes whole completions to other agents and to the environment; false removes thoughts (`<think>…</think>`)."""


class GraderConfig(Settings):
    """Limits of grading one text."""

    timeout: Annotated[float, FREE] = Field(default=Patience.grader, gt=0, allow_inf_nan=False)
    """Seconds after which its episode fails. Time spent queueing for a sandbox or a judge does not count."""


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
    """Everything that a run depends on; the resolved form is written next to its results."""

    name: str = "run"
    """Its folder is called `runs/NAME-TIME` where no other is given."""
    description: Annotated[str, FREE] = ""
    """For people; shown beside the run."""
    seed: int = Field(default=0, ge=0)
    """Of everything that is drawn: tasks, samples, initial weights of adapters and critics."""
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
    """Agent, policy or `*` → what its weights start from: a run (`RUN`, `RUN@best`, `RUN@STEP`), a PEFT folder or a model; one
    alone is for every trained policy."""
    warmup: WarmupConfig | None = None
    reward_model: RewardModelConfig | None = None
    optimizer: Annotated[OptimizerConfig, FROM_HERE_ON] = OptimizerConfig()
    episode: EpisodeConfig = EpisodeConfig()
    grader: GraderConfig = GraderConfig()
    training: TrainingConfig = TrainingConfig()
    tasks: TasksConfig = TasksConfig()
    league: LeagueConfig | None = None
    """Whom the learners play beside one another; null is self-play as the team map says."""
    entropy: EntropyConfig | None = None
    """An entropy bonus for single agents; null leaves it to the algorithm's loss."""
    evaluation: Annotated[EvaluationConfig, FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    trackers: Annotated[tuple[TrackerConfig, ...], FREE] = ()
    record: Annotated[RecordConfig, FREE] = RecordConfig()
    episodes: Annotated[EpisodesConfig, FREE] = EpisodesConfig()
    ray: Annotated[RayConfig, FROM_HERE_ON] = RayConfig()
    """What `--launch ray` places, and where; nothing else reads it."""

    @property
    def patience(self) -> Patience:
        """The time limits of this run, in seconds."""
        return Patience(
            environment=float(getattr(self.environment, "timeout", Patience.environment)),
            episode=self.episode.timeout,
            engine=float(getattr(self.engine, "timeout", Patience.engine)),
            grader=self.grader.timeout,
        )
