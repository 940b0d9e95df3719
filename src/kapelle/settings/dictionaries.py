"""Sections of the settings as plain dictionaries, for editors and type checkers. Made by `tools/section_types.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from kapelle.settings.schema import (
    AgentConfig,
    CompactionConfig,
    CurriculumConfig,
    DifficultyConfig,
    DType,
    EmbeddedConfig,
    EndpointConfig,
    EnterConfig,
    ExploiterConfig,
    FcpPopulation,
    FictitiousPopulation,
    LoraConfig,
    NamedAdapter,
    OwnModel,
    PastAdapter,
    PerTurn,
    PfspPopulation,
    PsroPopulation,
    RateConfig,
    RefreshConfig,
    ReplayConfig,
    Resources,
    SamplingConfig,
    SamplingPool,
    Schedule,
    SelfPlayPopulation,
    SetConfig,
)


class CheckpointDict(TypedDict, total=False):
    """When to save checkpoints and how many to keep."""

    every: int
    """Steps between checkpoints."""
    keep: int
    """Newest checkpoints that are kept."""
    best: str | None
    """Metric of evaluations, or else of steps, whose best checkpoint is kept beside the newest: `success`, `reward/solver`. One is
    saved after every evaluation that is better than all before."""
    best_is: Literal["highest", "lowest"]
    """Whether the best value of `best` is the highest or the lowest."""
    background: bool
    """Whether the next steps are taken while a checkpoint is written, from a copy in the machine's memory. One is written at a
    time; it counts when it is sealed."""


class EpisodesDict(TypedDict, total=False):
    """How long recorded episodes are kept; older ones are deleted after a checkpoint, in whole files of up to 16 steps."""

    keep: int | None
    """Newest training steps whose episodes and traces are kept for certain; null keeps all."""
    keep_evaluations: int | None
    """Newest training steps whose evaluations' episodes are kept for certain; null keeps all."""


class RecordDict(TypedDict, total=False):
    """What a run records for people who look at it, beside what it needs itself."""

    credit_episodes: int
    """Episodes per step of which each token's advantage, credit, ratio and entropy are kept: the best and the worst of the
    groups whose returns differ most. 0 keeps none."""


class TrackerDict(TypedDict, total=False):
    """A tracker in addition to the files of the run directory."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str
    """Name of the project, or of MLflow's experiment."""
    offline: bool
    """Keep everything on this machine, where the tracker can."""
    transcripts: int
    """Steps between two tables of what a few episodes' agents said; 0 sends none."""


class ResourcesDict(TypedDict, total=False):
    """What one actor takes of a machine; Ray counts it, and keeps nobody from using more."""

    cpus: float
    """Cores; also the number of threads that torch uses, at least one."""
    gpus: float
    """GPUs; a share of one lets actors live on the same GPU. An actor sees no others."""


class SamplingPoolDict(TypedDict, total=False):
    """Sampling workers that hold the models of some agents, and nothing else."""

    agents: Sequence[str]
    """The agents whose models they hold; those that share a model are named together."""
    workers: int
    """How many there are; rollout workers are dealt to them in turn."""
    cpus: float
    """Cores of each; see `Resources`."""
    gpus: float
    """GPUs of each."""


class RayDict(TypedDict, total=False):
    """What `--launch ray` places on a cluster, and what each of it takes."""

    address: str | None
    """The cluster's address (`auto`, or `host:port`); null starts a Ray of its own on this machine, which ends with the run."""
    rollout_workers: int
    """Actors that play episodes, shared out over the ranks of the trainer; 0 lets the ranks play, as without Ray."""
    least_rollout_workers: int | None
    """Rollout workers that the run waits for; the others join whenever the cluster has room for them, and may leave. null waits
    for all. The run is the same, to the bit, whichever are there."""
    trainer: Resources | ResourcesDict
    """What each rank of the trainer takes."""
    rollout: Resources | ResourcesDict
    """What each rollout worker takes."""
    scoring_workers: int
    """Actors that hold what is only scored, a verifier that pays (`reward_model`) or teaches, a teacher, an embedding model, and score
    for all ranks; 0 lets the ranks hold it and score, as without Ray."""
    scoring: Resources | ResourcesDict
    """What each scoring worker takes."""
    pools: dict[str, SamplingPool | SamplingPoolDict]
    """Name → a pool of sampling workers: `{big: {agents: [solver], workers: 2, gpus: 2}}`. Rollout workers ask them for these agents'
    turns, and hold the models of all other agents."""
    environment: Resources | ResourcesDict
    """What each environment worker takes; `episode.environment_workers` says how many each process that plays has."""
    spread: bool
    """Whether actors are put on as many machines as possible; otherwise on as few."""
    timeout: float
    """Seconds that the cluster has to find room for all of them, and each actor to start."""


class EmbeddedDict(TypedDict, total=False):
    """Size of the model that kapelle makes itself: the Qwen3 architecture, initialised from a seed."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Decoder blocks."""
    heads: int
    """Attention heads of a block."""
    kv_heads: int
    """Heads of keys and values; divides `heads`."""
    intermediate: int
    """Width of the MLP."""
    context: int
    """Most tokens (bytes of text) that it reads."""
    seed: int
    """Of the initial weights."""
    sees: bool
    """Whether it sees images: the architecture of Qwen2.5-VL, with a vision tower of two blocks, frozen as it is drawn."""


class ModelDict(TypedDict, total=False):
    """The team's base model."""

    path: str
    """`embedded` (made here), a local folder, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    embedded: EmbeddedConfig | EmbeddedDict
    dtype: DType
    """Compute type of forward and backward, in which frozen weights are held; what trains is held in float32."""
    tf32: bool
    """Whether CUDA computes products of float32 in TF32, several times as fast and with the ten bits that float16 keeps of a
    number. False keeps all 23; a CPU always does."""
    device: str | None
    """`cpu`, `cuda`, `cuda:1`, …; None is `cuda` where there is one (`cpu` for the embedded model)."""
    quantization: Literal["nf4"] | None
    """Frozen pretrained bases in four bits a weight, on CUDA, by `kapelle[quantised]`; sampled by `transformers`."""
    routing: Literal["free", "replayed"]
    """`replayed`: sampling records which experts of a mixture each token takes, and training takes them again (R3, 2510.11370)."""
    router: Literal["frozen", "trained"]
    """Whether all weights of a mixture of experts include its routers, where all weights train."""
    kernels: Literal["auto", "plain"]
    """On CUDA, `auto` takes kernels of torch and Triton that pass a trial at their first use; `plain` takes torch's plain operations."""
    chat_template_kwargs: dict[str, object]
    """Arguments of the model's chat template, such as `{enable_thinking: false}`, for all agents on this model."""


class LoraDict(TypedDict, total=False):
    """Size and place of the adapters; see `team.Lora`."""

    rank: int
    alpha: float
    targets: Sequence[str]
    """Names of layers, or `all-linear`; docs/models.md says which those are."""
    dropout: float


class OwnModelDict(TypedDict, total=False):
    """A model of the agent's own: trained in full, by adapter, or not at all."""

    model: str
    """A folder, a name on the Hugging Face hub, or `modelscope:OWNER/NAME`."""
    train: Literal["full", "lora", "none"]
    """All its weights, an adapter on it, or nothing."""
    dtype: DType | None
    """None is that of the section `model`, here and below."""
    device: str | None
    """As in the section `model`."""


class NamedAdapterDict(TypedDict, total=False):
    """An adapter that several agents share by its name."""

    adapter: str
    """The adapter's name."""


class PerTurnDict(TypedDict, total=False):
    """An adapter for each of an agent's turns in an episode: the k-th adapter acts in the k-th turn."""

    per_turn: int | Sequence[str]
    """The number of turns, with adapters of the agent's own (`ada@1`, `ada@2`, …); or a list of adapter names, in
    which a repeated name is the same adapter."""


class PastAdapterDict(TypedDict, total=False):
    """An adapter saved by a run, which is not trained any more: a past self to play against."""

    past: str
    """The run that saved it: `runs/mine`, `runs/mine@best` or `runs/mine@10` is the agent's own there. Or a PEFT folder, such as
    `runs/mine/checkpoints/00000010/policies/first`. Resolved settings hold the folder."""


class EndpointDict(TypedDict, total=False):
    """A frozen agent behind an OpenAI-compatible URL."""

    endpoint: str
    """The server's address, such as `https://api.example.com/v1`."""
    model: str
    """Name of the model, as the server has it."""
    api_key_env: str
    """Environment variable that holds the key; the key itself is never stored."""


class SamplingDict(TypedDict, total=False):
    """How agents sample while they learn; see `types.Sampling`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: Sequence[str]
    choices: Literal["legal"] | Sequence[str] | None
    """Every completion is one of these texts. `legal`: one of the moves that the environment lists for the agent when it is to move, so that
    none is invalid; elsewhere it says what it likes."""
    regex: str | None
    """Every completion matches this whole regular expression (Rust's syntax: no look-around, no back-references)."""
    json_schema: dict[str, object] | None
    """Every completion is JSON that this schema describes."""
    grammar: str | None
    """Every completion is a text of this grammar, in llguidance's form of Lark."""


class RateDict(TypedDict, total=False):
    """The learning rates of what acts for an agent, and of its critic; null is that of the section `optimizer`."""

    lr: float | None
    critic_lr: float | None
    schedule: Schedule | None
    warmup_steps: int | None


class AgentDict(TypedDict, total=False):
    """One agent: its prompts, which weights act for it, how it samples."""

    name: str
    weights: (
        Literal["shared", "lora", "frozen"]
        | OwnModel
        | NamedAdapter
        | PerTurn
        | PastAdapter
        | EndpointConfig
        | OwnModelDict
        | NamedAdapterDict
        | PerTurnDict
        | PastAdapterDict
        | EndpointDict
        | None
    )
    """None uses `team.sharing`."""
    lora: LoraConfig | LoraDict | None
    """None uses `team.lora`."""
    system: str | None
    prompt: str | None
    sampling: SamplingConfig | SamplingDict | None
    """None uses `team.sampling`."""
    chat_template_kwargs: dict[str, object]
    """Arguments of its model's chat template, over those of the section `model`."""
    share_critic_with: str | int | None
    """Name or seat number (from 0) of the agent whose critic this one uses too."""
    optimizer: RateConfig | RateDict | None
    """None uses the section `optimizer`."""


class TeamDict(TypedDict, total=False):
    """The team: agents and how they share weights."""

    sharing: Literal["shared", "lora", "frozen"]
    """`shared`: one set of full weights; `lora`: one adapter per agent; `frozen`: nothing trains."""
    lora: LoraConfig | LoraDict
    sampling: SamplingConfig | SamplingDict
    agents: int | Sequence[AgentConfig | AgentDict]
    """The agents in seat order, or the number of identical ones (`agent_0`, `agent_1`, …)."""
    critic_lora: LoraConfig | LoraDict
    critic_sharing: Literal["own", "shared"] | None
    """None uses the algorithm's choice: own critics where they are local, a shared one where it is central."""
    critic_model: str | None
    """The model that critics stand on, and a verifier that pays: a folder or a name on a hub, of any family. Critics then read in its
    own tokens. Null is each agent's own model."""
    critic_train: Literal["lora", "full", "head"]
    """What critics train of their model: an adapter (`critic_lora`), all weights of a copy of their own, or nothing but the head."""
    critic_dtype: DType | None
    """With this or `critic_device`, critics and a verifier that pays stand on a copy of their base of that kind."""
    critic_device: str | None
    """See `critic_dtype`."""


class OptimizerDict(TypedDict, total=False):
    """AdamW (1711.05101), one instance per policy."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
    """The 8-bit ones hold moments in one byte (2110.02861), for full weights on CUDA; they need `kapelle[quantised]`."""
    lr: float
    """Learning rate; full weights usually take a tenth of what adapters do."""
    critic_lr: float | None
    """None uses `lr`."""
    betas: Sequence[float]
    """Decay of the two moments."""
    eps: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Decoupled weight decay."""
    max_grad_norm: float | None
    """Norm to which the gradient of each policy is clipped separately; null turns clipping off."""
    schedule: Schedule
    """How the rate goes on after `warmup_steps`, until the last step."""
    warmup_steps: int
    """Optimiser steps over which the learning rate rises from 0, at which the first is taken, as in transformers, TRL and verl."""
    warmup_share: float
    """The same as a share of all optimiser steps, whose number `training.epochs` may leave open; rounded up."""


class RefreshDict(TypedDict, total=False):
    """How a verifier goes on learning while it pays: from answers of the team of now that the environment grades."""

    share: float
    """Share of each step's answers, at least one, that is graded; a grade is a label that has to be supplied."""
    lr: float
    """Learning rate, constant. One that is high for few grades makes it forget what it knew."""
    updates: int
    """Optimiser steps of the verifier after each step of training."""
    batch: int
    """Graded answers in each of them, drawn from those that are remembered."""
    memory: int
    """Graded answers that are remembered, the newest."""


class RewardModelDict(TypedDict, total=False):
    """A trained reward model: λ times its score of a turn's answer is added to the reward of the turn."""

    path: str
    """The folder `verifier` of a checkpoint of `algorithm.name: verifier`, or `stage:NAME`."""
    weight: float
    """λ, in units of reward; scores lie between 0 and 1."""
    device: str | None
    """The device on which it runs with its own copy of the base; null shares the team's base."""
    dtype: DType | None
    """The compute type of a copy of its own; null is that of the section `model`."""
    refresh: RefreshConfig | RefreshDict | None
    """Lets it go on learning from graded answers of the team that it pays; null leaves it as it was saved."""


class WarmupDict(TypedDict, total=False):
    """Supervised warm-up on scripted demonstrations of the roles, before everything else; cached."""

    steps: int
    """Optimiser steps."""
    demonstrations: int
    """Number of episodes that the script plays on the training split."""
    batch: int
    """Sequences per step."""
    lr: float
    """Learning rate."""
    schedule: Schedule
    """How the rate goes on."""


class TrainingDict(TypedDict, total=False):
    """How much to train, and when to stop."""

    steps: int
    """A learning rate or a bonus that ends with them (`optimizer.schedule`, `loss.entropy_end`) ends with the number given last."""
    epochs: float | None
    """How often all tasks of training are played, in place of `steps`, which is then computed from it: the last step is filled up with
    tasks of the next epoch. Null goes by `steps`."""
    critic_warmup: int
    """The first steps, in which only critics learn, or the utilities and mixer of `vdn` and `qmix`; policies play as they are."""
    tasks_per_step: int
    """Tasks (groups) per step; each one is played `algorithm.group_size` times."""
    max_staleness: int
    """Steps by which rollouts may run ahead of the update; 0 is on-policy. Above 0, every step but the first ones
    learns from samples of older weights: see `algorithm.loss.importance_cap` and `algorithm.gae.vtrace`."""
    overlap: bool
    """Whether a second process samples while this one learns. It takes a second copy of the base models, and needs
    `max_staleness` of 1 or more to save time; the results are the same, to the bit."""
    partial_rollouts: float
    """Largest share of a step's groups that may be left unfinished when it ends; `true` is a quarter. They go on in the next
    step, with the weights of then, so that no step waits for its longest episodes. Of the steps of `max_staleness`, one (from 2 on) is
    for running ahead and the others for groups that are left: no token is older than it says."""
    microbatch_tokens: int | Literal["auto"]
    """Maximum tokens in one forward and backward pass; the result does not depend on it. `auto` is 4096 on a CPU, and on a GPU
    what fits in its memory when the first pass begins."""
    gradient_checkpointing: bool
    """True keeps of each decoder block its input alone and computes the block again in the backward pass: the same
    gradients, less memory, and an update that takes about half as long again."""
    max_failed_share: float
    """The run stops when a larger share of a step's episodes fails."""
    parity_tolerance: float | None
    """Largest |trainer − sampler| log-prob (nats), in half precision of all but a few tokens; None uses 1e-4 in float32, 0.25 in
    bfloat16 and 0.1 in float16."""
    non_finite: Literal["stop", "skip"]
    """What happens to a step whose loss or gradient is not finite."""


class DifficultyDict(TypedDict, total=False):
    """Tasks of a finite train split by how often the team solves them, measured with its first weights before the first step."""

    low: float
    """Tasks that are solved less often are left out."""
    high: float
    """Tasks that are solved more often are left out."""
    samples: int
    """Answers to each task, sampled as in training."""


class CurriculumDict(TypedDict, total=False):
    """Easy tasks first: each step draws from the easiest share, which grows until all tasks take part."""

    by: str
    """What says how hard a task is: `solve_rate`, as `tasks.difficulty` measures it; or a field of the tasks' data that is a number,
    or ends in one (`Level 3`), the larger the harder."""
    start: float
    """Share of the tasks that the first step draws from."""
    steps: int
    """Steps until all tasks take part; the share grows evenly."""


class ReplayDict(TypedDict, total=False):
    """Past groups in which some episodes succeeded and others did not, learned from again."""

    groups: int
    """Most past groups that a step learns from, beside its own."""
    capacity: int
    """Newest such groups that are kept, one for each task."""
    max_age: int | None
    """Steps after which a group is dropped; null keeps it as long as there is room."""


class TasksDict(TypedDict, total=False):
    """Which of the environment's tasks are played."""

    max_prompt_tokens: int | Literal["context"] | None
    """Most tokens of an agent's first prompt: tasks with a longer one are left out of training and of evaluations. `context` is what
    the model reads less the agent's `max_tokens`. Null leaves none out, and refuses a run whose first tasks do not fit the model."""
    difficulty: DifficultyConfig | DifficultyDict | None
    curriculum: CurriculumConfig | CurriculumDict | None
    replay: ReplayConfig | ReplayDict | None


class SetDict(TypedDict, total=False):
    """What a set of `evaluation.sets` has of its own; null is as in the whole evaluation."""

    samples: int | None
    """Answers to each of its problems."""
    temperature: float | None
    """At which all agents answer it."""
    top_p: float | None
    """Least probability that the kept tokens have together."""
    top_k: int | None
    """How many of the likeliest tokens are kept; 0 keeps all."""
    max_tokens: int | None
    """Most tokens of an answer."""


class EvaluationDict(TypedDict, total=False):
    """How the team is evaluated on held-out problems, always of the `test` split."""

    problems: int
    """Problems of an evaluation before and after training."""
    every: int
    """Steps between evaluations during training; 0 evaluates only before and after."""
    problems_while_training: int
    """Problems of an evaluation in between."""
    greedy: bool
    """False samples as in training."""
    temperature: float | None
    """At which all agents answer, in place of what `greedy` says; as training does, where null."""
    top_p: float | None
    """Least probability that the kept tokens have together, where agents are sampled; null is as in training."""
    top_k: int | None
    """How many of the likeliest tokens are kept, where agents are sampled; 0 keeps all, null is as in training."""
    max_tokens: int | None
    """Most tokens of an answer; null is as in training."""
    samples: int
    """Answers to each problem, sampled where there are several. The success is then the mean over problems (avg@k);
    pass@k (2107.03374) and, where answers can be compared, maj@k (2203.11171) stand beside it."""
    sets: dict[str, object]
    """Further sets of problems, each by a name and the settings of the environment whose test split it is: `{aime: {name: math, …}}`.
    Each has rates of its own beside those of the run's environment; a problem that is trained on too is refused."""
    for_set: dict[str, SetConfig | SetDict]
    """What sets have of their own, by the set's name: `{aime: {samples: 32, temperature: 0.6}}`."""
    prices: dict[str, Sequence[float]]
    """What a million tokens cost that an agent reads, and that it writes, by agent; `default` is for those without a name here."""
    before_and_after: bool
    """Whether `problems` are played before the first and after the last step."""


class SelfPlayPopulationDict(TypedDict, total=False):
    """The learners play their present selves alone; past selves are kept and measured, and drawn by nobody."""

    name: Literal["self_play"]
    share: float
    """Share of the tasks that are played against the pool: none."""


class FictitiousPopulationDict(TypedDict, total=False):
    """Every member is drawn equally often: fictitious play, where the members are past selves."""

    name: Literal["fictitious"]
    share: float
    """Share of the tasks that are played against the pool; in the others the learners play one another."""


class PfspPopulationDict(TypedDict, total=False):
    """Members that the learner does not beat yet are drawn more often (PFSP of AlphaStar, 10.1038/s41586-019-1724-z)."""

    name: Literal["pfsp"]
    share: float
    """As in `fictitious`; AlphaStar's main agents played half of their games by PFSP and 35 % against themselves."""
    weight: Literal["hard", "even"]
    """Of a member that the learner beats with probability x: `hard` is (1 − x)^`power`, `even` is x(1 − x)."""
    power: float
    """How much more often the harder ones of `hard` are drawn; 1 is in proportion to the share of points that they win."""


class PsroPopulationDict(TypedDict, total=False):
    """Members are drawn by a meta-strategy of the table of all pairs (PSRO, 1711.00832): the learner is a best response to it."""

    name: Literal["psro"]
    share: float
    """As in `fictitious`."""
    by: Literal["nash", "alpha_rank", "prd", "uniform"]
    """The meta-strategy: a Nash equilibrium of the table, α-Rank (1903.01373), projected replicator dynamics, or all alike."""
    games: int
    """Games of each pair and seat for the table, where the game is too large to compute them exactly."""
    learners: int
    """How many learn at once, in a line (pipeline PSRO, 2006.08555): the first answers the members, each further one the members and the
    learners before it. The first enters, and goes to the end of the line."""
    refresh: int
    """Steps after which learners of a line see again what those before them have become, and the table is filled for it."""


class FcpPopulationDict(TypedDict, total=False):
    """Partners learn first, each with itself alone, and then the learner with all of them (fictitious co-play, 2110.08176)."""

    name: Literal["fcp"]
    share: float
    """As in `fictitious`."""
    partners: int
    """How many learn by self-play, each with adapters of its own."""
    alone: float
    """Share of the run's steps in which they do; in the others the learner learns."""
    spread: float
    """Standard deviation of the noise on the matrices B of each partner's adapters at the start. Adapters that all begin as their base
    settle on one convention, and the learner then meets no other; a spread lets partners begin apart, as networks drawn anew do."""


class EnterDict(TypedDict, total=False):
    """When the learners, as they are, enter the pool as a member."""

    every: int
    """Steps from one entry to the next; with `beats` the fewest."""
    beats: float | None
    """Share of points (a draw is half of one) that the learner must win against the pool, more likely than not by `confidence`;
    null lets it enter as it is."""
    confidence: float
    """How certain it must be, by Wilson's interval over the games since the last entry, that it wins more than `beats`."""
    at_latest: int | None
    """Steps after which it enters even if it has not beaten the pool, `every` or more; null waits for ever."""
    restart: bool
    """Whether the learner then begins at its start again, so that each member is a fresh answer to those before it, as in PSRO; a policy
    that has become certain of its moves hardly finds another one."""


class ExploiterDict(TypedDict, total=False):
    """A second learner whose only opponent is the first one as it is now; both enter the pool (AlphaStar's main exploiter)."""

    share: float
    """Share of the tasks in which it learns."""
    restart: bool
    """Whether it begins at its start again each time it has entered."""


class LeagueDict(TypedDict, total=False):
    """A pool of opponents or partners, and how it grows: past selves, frozen models, endpoints, players of the environment."""

    population: (
        Literal["self_play", "fictitious", "pfsp", "psro"]
        | SelfPlayPopulation
        | FictitiousPopulation
        | PfspPopulation
        | PsroPopulation
        | FcpPopulation
        | SelfPlayPopulationDict
        | FictitiousPopulationDict
        | PfspPopulationDict
        | PsroPopulationDict
        | FcpPopulationDict
    )
    """Who of the pool is drawn: `self_play`, `fictitious`, `pfsp`, `psro`, or one of them with its settings; or `fcp` with its own."""
    members: dict[
        str, str | PastAdapter | OwnModel | EndpointConfig | PastAdapterDict | OwnModelDict | EndpointDict
    ]
    """Members that are always there, by name: `frozen` (the base), `{past: RUN@10}`, `{model: FOLDER}`, `{endpoint: …, model: …}`, or a
    player of the environment such as `nash`, `random` or `mcts(simulations=200)`."""
    enter: EnterConfig | EnterDict | None
    """When past selves enter; null lets nobody enter."""
    start: bool
    """Whether the learners as they are at the start are the first member, where past selves enter at all."""
    keep: int
    """Most past selves in the pool."""
    leaves: Literal["oldest", "weakest", "thinned"]
    """Who leaves when there are more: the oldest, the one that the learner beats most surely, or the one whose neighbours in time are
    nearest, so that those that stay are spread over the run."""
    slots: int
    """Most past selves that are in the memory of the models, and so in one step's games; the others rest."""
    in_memory: int
    """Most past selves whose weights are in the machine's memory, where a run directory can hold the others."""
    forget: float
    """Weight of earlier games, per step, in the win rates by which members are drawn: the learner changes."""
    exact: int
    """Most information states of a game for which payoffs and NashConv are computed exactly from the policies; 0 computes none."""
    pair_games: int
    """Games that each pair of past selves plays when one enters, for the table of payoffs and the pool's diversity, where nothing is
    exact; 0 plays none. `psro` has `games` of its own."""
    exploiter: ExploiterConfig | ExploiterDict | None


class CompactionDict(TypedDict, total=False):
    """How a conversation that no longer fits goes on: from its first and last messages."""

    over: int | None
    """Tokens of a prompt beyond which it is shortened; null is where the answer (`sampling.max_tokens`) would not fit the context."""
    keep_first: int
    """Messages that stay from the beginning, after the system message."""
    keep_last: int
    """Most messages that stay from the end; fewer where they do not fit."""
    note: str
    """What the agent reads in their place; `{dropped}` is their number, and an empty text leaves nothing."""


class EpisodeDict(TypedDict, total=False):
    """Limits of an episode, and where its world lives."""

    timeout: float
    """Seconds after which it is given up and fails, counted from its start."""
    environment_workers: int
    """Processes in which worlds live, with their games, graders and sandboxes; 0 keeps them in this one. The results
    are the same, to the bit."""
    compaction: CompactionConfig | CompactionDict | None
    """What is kept of a conversation that no longer fits; null lets its episode fail."""
    share_thoughts: bool
    """True passes whole completions to other agents and to the environment; else thoughts (`<think>…</think>`) are left out."""


class GraderDict(TypedDict, total=False):
    """Limits of grading one text."""

    timeout: float
    """Seconds after which its episode fails. Time spent queueing for a sandbox or a judge does not count."""


class TheirNames(TypedDict, total=False):
    """Settings by the names of other libraries: `settings.aliases`."""

    activation_checkpointing: object
    """Of TRL: `training.gradient_checkpointing`."""
    actor_learning_rate: object
    """Of OpenRLHF: `optimizer.lr`."""
    actor_rollout_ref: Mapping[str, object]
    """Of verl, nested as there."""
    adam_beta1: object
    """Of TRL: `optimizer.betas`."""
    adam_beta2: object
    """Of TRL: `optimizer.betas`."""
    adam_epsilon: object
    """Of TRL: `optimizer.eps`."""
    advantage_normalization: object
    """Of CoMLRL: `algorithm.scale`."""
    agent_learning_rate: object
    """Of CoMLRL: `optimizer.lr`."""
    beta: object
    """Of TRL: `algorithm.loss.kl_coefficient`, `algorithm.beta`."""
    bf16: object
    """Of TRL: `model.dtype`."""
    chat_template_kwargs: object
    """Of TRL: `model.chat_template_kwargs`."""
    critic: Mapping[str, object]
    """Of verl, nested as there."""
    critic_learning_rate: object
    """Of CoMLRL: `optimizer.critic_lr`."""
    custom_reward_function: Mapping[str, object]
    """Of verl, nested as there."""
    dag: Mapping[str, object]
    """Of verl, nested as there."""
    data: Mapping[str, object]
    """Of verl, nested as there."""
    dataset_name: object
    """Of TRL: `environment.path`."""
    dataset_prompt_column: object
    """Of TRL: `environment.question_field`."""
    dataset_test_split: object
    """Of TRL: `environment.test`."""
    dataset_train_split: object
    """Of TRL: `environment.train`."""
    delta: object
    """Of TRL: `algorithm.loss.dual_clip`."""
    discount: object
    """Of CoMLRL: `algorithm.gae.gamma_turn`."""
    dpo_beta: object
    """Of CoMLRL: `algorithm.beta`."""
    dtype: object
    """Of TRL: `model.dtype`."""
    enable_thinking: object
    """Of TRL: `model.chat_template_kwargs`."""
    entropy_coef: object
    """Of TRL: `algorithm.loss.entropy_coefficient`."""
    epochs: object
    """Of kapelle: `training.epochs`."""
    epsilon: object
    """Of TRL: `algorithm.loss.clip_low`, `algorithm.loss.clip_high`."""
    epsilon_high: object
    """Of TRL: `algorithm.loss.clip_high`."""
    eval_interval: object
    """Of CoMLRL: `evaluation.every`."""
    eval_num_samples: object
    """Of CoMLRL: `evaluation.problems_while_training`."""
    eval_on_start: object
    """Of TRL: `evaluation.before_and_after`."""
    eval_steps: object
    """Of TRL: `evaluation.every`."""
    eval_strategy: object
    """Of TRL: `evaluation.every`."""
    fp16: object
    """Of TRL: `model.dtype`."""
    generate_max_len: object
    """Of OpenRLHF: `team.sampling.max_tokens`."""
    generation_batch_size: object
    """Of TRL: `training.tasks_per_step`."""
    gradient_accumulation_steps: object
    """Of TRL: `training.tasks_per_step`."""
    gradient_checkpointing: object
    """Of TRL: `training.gradient_checkpointing`."""
    importance_sampling_level: object
    """Of TRL: `algorithm.loss.level`."""
    input_key: object
    """Of OpenRLHF: `environment.question_field`."""
    joint_mode: object
    """Of CoMLRL: `algorithm.joint`."""
    label_key: object
    """Of OpenRLHF: `environment.answer_field`."""
    label_smoothing: object
    """Of TRL: `algorithm.label_smoothing`."""
    lambd: object
    """Of OpenRLHF: `algorithm.gae.lam`."""
    learning_rate: object
    """Of TRL: `optimizer.lr`."""
    load_in_4bit: object
    """Of TRL: `model.quantization`."""
    lora_alpha: object
    """Of TRL: `team.lora.alpha`."""
    lora_dropout: object
    """Of TRL: `team.lora.dropout`."""
    lora_r: object
    """Of TRL: `team.lora.rank`."""
    lora_target_modules: object
    """Of TRL: `team.lora.targets`."""
    loss_type: object
    """Of TRL: `algorithm.loss.aggregation`, `algorithm.loss.kind`, `algorithm.kind`."""
    lr_scheduler_type: object
    """Of TRL: `optimizer.schedule`."""
    mask_truncated_completions: object
    """Of TRL: `algorithm.truncated`."""
    max_completion_length: object
    """Of TRL: `team.sampling.max_tokens`."""
    max_grad_norm: object
    """Of TRL: `optimizer.max_grad_norm`."""
    max_new_tokens: object
    """Of CoMLRL: `team.sampling.max_tokens`."""
    max_prompt_length: object
    """Of TRL: `tasks.max_prompt_tokens`."""
    max_steps: object
    """Of TRL: `training.steps`."""
    max_tool_calling_iterations: object
    """Of TRL: `environment.max_turns`."""
    model_name_or_path: object
    """Of TRL: `model.path`."""
    n_samples_per_prompt: object
    """Of OpenRLHF: `algorithm.group_size`."""
    no_cuda: object
    """Of TRL: `model.device`."""
    num_agents: object
    """Of CoMLRL: `team.agents`."""
    num_generations: object
    """Of TRL: `algorithm.group_size`."""
    num_iterations: object
    """Of TRL: `algorithm.epochs`."""
    num_train_epochs: object
    """Of TRL: `training.epochs`."""
    num_turns: object
    """Of CoMLRL: `workflow.rounds`."""
    off_policy_mask_threshold: object
    """Of TRL: `algorithm.loss.sequence_mask`."""
    optim: object
    """Of TRL: `optimizer.name`."""
    peft_config: object
    """Of TRL: `team.lora`, `team.sharing`."""
    per_device_train_batch_size: object
    """Of TRL: `training.tasks_per_step`, `algorithm.minibatches`."""
    preference_num_candidates: object
    """Of CoMLRL: `algorithm.group_size`."""
    pretrain: object
    """Of OpenRLHF: `model.path`."""
    project: object
    """Of TRL: `trackers`."""
    prompt_data: object
    """Of OpenRLHF: `environment.path`."""
    prompt_max_len: object
    """Of OpenRLHF: `tasks.max_prompt_tokens`."""
    reference_kl_coef: object
    """Of CoMLRL: `algorithm.loss.kl_coefficient`."""
    reference_kl_enabled: object
    """Of CoMLRL: `algorithm.loss.kl_coefficient`."""
    report_to: object
    """Of TRL: `trackers`."""
    rollout_batch_size: object
    """Of OpenRLHF: `training.tasks_per_step`."""
    rollout_buffer_size: object
    """Of CoMLRL: `training.tasks_per_step`."""
    run_name: object
    """Of TRL: `name`."""
    sapo_temperature_neg: object
    """Of TRL: `algorithm.loss.tau_negative`."""
    sapo_temperature_pos: object
    """Of TRL: `algorithm.loss.tau_positive`."""
    save_steps: object
    """Of TRL: `checkpoint.every`."""
    save_total_limit: object
    """Of TRL: `checkpoint.keep`."""
    scale_rewards: object
    """Of TRL: `algorithm.scale`."""
    steps_per_generation: object
    """Of TRL: `algorithm.minibatches`."""
    sync_ref_model: object
    """Of TRL: `algorithm.reference_every`."""
    system_prompt: object
    """Of TRL: `team.agents`."""
    temperature: object
    """Of TRL: `team.sampling.temperature`."""
    tf32: object
    """Of TRL: `model.tf32`."""
    top_k: object
    """Of TRL: `team.sampling.top_k`."""
    top_p: object
    """Of TRL: `team.sampling.top_p`."""
    torch_dtype: object
    """Of TRL: `model.dtype`."""
    trainer: Mapping[str, object]
    """Of verl, nested as there."""
    use_cpu: object
    """Of TRL: `model.device`."""
    use_peft: object
    """Of TRL: `team.sharing`."""
    use_vllm: object
    """Of TRL: `engine.name`."""
    value_clip_range: object
    """Of CoMLRL: `algorithm.value_loss.clip`."""
    value_loss_coef: object
    """Of CoMLRL: `algorithm.value_loss.coefficient`."""
    vllm_server_base_url: object
    """Of TRL: `engine.server`."""
    vllm_structured_outputs_regex: object
    """Of TRL: `team.sampling.regex`."""
    vllm_tensor_parallel_size: object
    """Of TRL: `engine.options`."""
    wandb_project: object
    """Of TRL: `trackers`."""
    warmup_ratio: object
    """Of TRL: `optimizer.warmup_steps`, `optimizer.warmup_share`."""
    warmup_steps: object
    """Of TRL: `optimizer.warmup_steps`."""
    weight_decay: object
    """Of TRL: `optimizer.weight_decay`."""
