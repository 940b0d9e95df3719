"""The basic types of kapelle: frozen values that flow from the sampler to the optimiser.

This module uses only the standard library. Token ids are authoritative; text is stored with them for readers.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

Json = Any
"""A value that `json.dumps` converts without loss."""

Split = Literal["train", "test"]
FinishReason = Literal["stop", "length", "error"]


SIGNATURES: Mapping[str, tuple[bytes, bytes]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n", b""),
    "image/jpeg": (b"\xff\xd8\xff", b""),
    "image/gif": (b"GIF8", b""),
    "image/webp": (b"RIFF", b"WEBP"),
}
"""Media type → the first bytes of its files, and the bytes from the ninth on."""

LARGEST_IMAGE = 20_000_000
"""Maximum size of an image's file, in bytes."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that an agent reads, as the bytes of a file. Two images are equal if their bytes are equal."""

    hash: str
    """The first 32 hex digits of the SHA-256 of its bytes."""
    media: str
    """One of `SIGNATURES`."""
    data: bytes = field(repr=False, compare=False)
    """Bytes of the file; empty if only its name was recorded."""

    @classmethod
    def of(cls, data: bytes) -> Image:
        """Return the image of a PNG, JPEG, GIF or WebP file; raise ValueError for other formats or too many bytes.

        Only the first bytes are checked; a damaged image raises an error when it is read.
        """
        if len(data) > LARGEST_IMAGE:
            raise ValueError(
                f"An image has {len(data):,} bytes, but the limit is {LARGEST_IMAGE:,}. Make it smaller."
            )
        for media, (begins, ninth) in SIGNATURES.items():
            if data.startswith(begins) and data[8:].startswith(ninth):
                return cls(hashlib.sha256(data).hexdigest()[:32], media, bytes(data))
        raise ValueError(
            "An image's bytes are not a PNG, JPEG, GIF or WebP file. Give the bytes of such a file."
        )

    @property
    def file(self) -> str:
        """Name of its file in a run: the hash with the extension of its type."""
        return f"{self.hash}.{self.media.removeprefix('image/')}"

    @property
    def url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.media};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a mixture-of-experts model for each token of a prompt and its completion, except the last token."""

    layers: int
    """Number of blocks with experts."""
    chosen: int
    """Experts per token and block."""
    data: bytes = field(repr=False)
    """Numbers of the experts, two bytes each (little-endian), by token and then by block."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in OpenAI's shape."""

    role: str
    content: str
    speaker: str | None = None
    """Name of the agent that wrote it; None for a message of the environment or workflow."""
    images: tuple[Image, ...] = ()
    """Images before its text."""
    structured: str | None = None
    """The message as JSON in OpenAI's shape, with tool calls and `tools` (before the first message that needs them), for chat
    templates with their own form for these. `content` has the same information as text. None without tools."""


def worded(message: Message, wording: Callable[[str], str]) -> Message:
    """Return the message with `wording` applied to its text; tools are kept."""
    row = {} if message.structured is None else json.loads(message.structured)
    structured = json.dumps({**row, "content": wording(row["content"])}, ensure_ascii=False) if row else None
    return replace(message, content=wording(message.content), structured=structured)


def as_text(messages: Sequence[Message]) -> str:
    """Return a conversation as one string: the content of a single message, else each content after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


@dataclass(frozen=True, slots=True)
class SampledMessage(Message):
    """A completion in the agent's own conversation, with its sampled tokens."""

    ids: tuple[int, ...] = ()
    thoughts: int = 0
    """Number of tokens at its beginning that are thoughts."""


ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "grammar", "endpoint"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on a completion: tokens that violate it have probability 0, and the turn ends when the completion satisfies it.

    Two constraints are equal if their kinds and texts are equal. Use the class methods to create constraints.
    """

    kind: ConstraintKind
    text: str
    """The schema or the choices as JSON, the regular expression, or the grammar; empty for `json_object`. For `endpoint`, the fields
    of a chat request as JSON."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Json]) -> Constraint:
        """Return the constraint to JSON of this schema, with properties in the schema's order."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> Constraint:
        """Return the constraint to any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return the constraint to strings that match the whole pattern (in Rust's syntax, without look-around or back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Constraint:
        """Return the constraint to one of these strings, without duplicates, in their order."""
        return cls(
            "choices", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False, separators=(",", ":"))
        )

    @classmethod
    def endpoint(cls, fields: Mapping[str, Json]) -> Constraint:
        """Return the fields of a chat request (`tools`, `tool_choice`, …) that the server of an endpoint applies itself."""
        return cls("endpoint", json.dumps(fields))

    @classmethod
    def legal(cls) -> Constraint:
        """Return the constraint to the legal moves that the environment lists at the turn (`environment.KnowsMoves`)."""
        return cls("choices", "legal")

    @property
    def is_legal(self) -> bool:
        """Whether it is the constraint to legal moves."""
        return self == Constraint.legal()

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Return the constraint to strings of this grammar, in llguidance's dialect of Lark (`%json {…}` embeds a schema)."""
        return cls("grammar", lark)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the sampling distribution that callers of a served team set, applied in vLLM's order. Training uses none."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and the values added to their logits."""
    min_tokens: int = 0
    """Minimum number of tokens of an answer without a constraint."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in the prompt or the completion."""
    presence_penalty: float = 0.0
    """Value subtracted from the logits of tokens in the completion."""
    frequency_penalty: float = 0.0
    """Value subtracted from a token's logit for each occurrence in the completion."""
    min_p: float = 0.0
    """Tokens whose probability is less than this share of the most likely token's are excluded."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a policy call; log-probs are those of the distribution that the settings describe."""

    max_tokens: int = 64
    """Maximum tokens of a completion, including the end-of-turn token."""
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy sampling, with log-probs at temperature 1."""
    top_p: float = 1.0
    """Cumulative probability of the smallest set of tokens from which one is sampled; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens from which one is sampled; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; their tokens are part of it."""
    constraint: Constraint | None = None
    """Constraint of the completion; None for free text."""
    adjusted: Adjustments | None = None
    """Changes that a caller has set; None means the distribution of the settings above."""

    @classmethod
    def from_row(cls, row: Mapping[str, Json]) -> Sampling:
        """Return the sampling from a row of `dataclasses.asdict`, in which JSON may have converted tuples to lists."""
        constraint, adjusted = row.get("constraint"), row.get("adjusted")
        own = {**row, "stop": tuple(row["stop"])}
        if adjusted is not None:
            biases = tuple((token, bias) for token, bias in adjusted["logit_bias"])
            own["adjusted"] = Adjustments(**{**adjusted, "logit_bias": biases})
        return cls(**{**own, "constraint": None if constraint is None else Constraint(**constraint)})


@dataclass(frozen=True, slots=True)
class Cast:
    """Another policy or player that takes an agent's role in place of the team's own policy."""

    policy: str
    """The policy that acts; empty if the environment itself acts (`environment.HasPlayers`)."""
    player: str
    """Name of the member in records and results."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment; it is the same value in every process."""

    id: str
    """Identifier, unique within the environment and its split."""
    question: str
    """Text that every agent may read; empty for games, whose text comes from `EpisodeState.observe`."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """Data for the environment only, such as the correct answer; hidden from agents."""
    part: str = ""
    """Name of the mixture's environment to which the task belongs; empty outside of a mixture. Returns of different parts are
    not comparable, so credit can separate them."""
    cast: Mapping[str, Cast] = field(default_factory=dict)
    """Agent → the policy or player that replaces the policy of the team map. All episodes of a task have the same cast, so that a
    group has only one opponent."""
    system: str = ""
    """The task's system message, which every agent reads after its own (`Agent.system`)."""
    messages: tuple[tuple[Message, ...], ...] = ()
    """Messages before each turn of an agent, if the task is a conversation; `question` is the first entry as one string."""
    rendered: bool = False
    """Whether `question` is a whole prompt, including the chat template. The agent then reads its tokens unchanged."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The question as the messages of a conversation."""
        return self.messages[0] if self.messages else (Message("user", self.question),)

    @property
    def environment_players(self) -> Mapping[str, str]:
        """Agent → the environment's own player that acts for it."""
        return {agent: each.player for agent, each in self.cast.items() if not each.policy}


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy call: the prompt, the completion, and the weights that sampled it."""

    agent: str
    policy: str
    version: int
    """Number of updates of the weights that sampled this turn, or its last token if there are several (`versions`)."""
    weights_hash: str
    """Content hash of those weights."""
    index: int
    """Position in the episode's global time order, from 0."""
    completed_before: int
    """Number of the episode's turns that were complete when this turn's prompt was fixed."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-prob of each completion token in nats, under the distribution that was sampled."""
    finish_reason: FinishReason
    text: str
    """The completion as text, without the end-of-turn token."""
    new_messages: tuple[Message, ...] = ()
    """Messages that entered the agent's context since its last turn."""
    reward: float = 0.0
    """Reward of the agent between this turn and its next one."""
    score: float | None = None
    """Score in [0, 1] of this text as its agent's answer, if the workflow requested one; separate from rewards."""
    parent: int | None = None
    """Index of the turn with which the episode continued in place of this candidate (tree sampling)."""
    continuation_return: float | None = None
    """Mean return of its agent over the episodes that continue from it (tree sampling)."""
    trained: bool = True
    """False for frozen agents, opponents and endpoints."""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) of each span of completion tokens by the same weights, in order; empty if `version` sampled
    all tokens (`training.partial_rollouts`)."""
    images: tuple[Image, ...] = ()
    """Images of its prompt in order."""
    routing: Routing | None = None
    """Experts that sampled it, if training reuses them (`model.routing: replayed`)."""
    constraint: Constraint | None = None
    """Constraint of the completion; log-probs are those of the constrained distribution."""
    caller: int | None = None
    """Index of another agent's turn that caused this turn by a tool call, a handoff or a call of a sub-agent. None if no turn
    did, or if this is unknown (custom workflows, some external programs)."""
    copied: bool = False
    """Whether it was sampled by another episode of the group and is shared; its tokens are counted in that episode (`Data.widths`)."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens as counted by an endpoint's server; None if the ids above are exact."""

    thoughts: int = 0
    """Number of characters at the beginning of `text` that are thoughts (`<think>…</think>`); other agents do not read them."""
    dropped: int = 0
    """Number of messages that compaction dropped from its conversation before this turn; `new_messages` then starts a new
    conversation (`episode.compaction`)."""

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.logprobs), "one log-prob for each sampled token"
        assert not self.versions or sum(tokens for _, tokens in self.versions) == len(self.completion_ids)

    @property
    def words(self) -> str:
        """The text without thoughts; empty if the thoughts were truncated."""
        return self.text[self.thoughts :]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(version, number of tokens) of each span of tokens by the same weights: `versions`, or the only span."""
        return self.versions or ((self.version, len(self.completion_ids)),)


@dataclass(frozen=True, slots=True)
class RewardEvent:
    """A reward of an agent during an episode, before its end."""

    agent: str
    after: int
    """Number of turns recorded at that time."""
    reward: float


@dataclass(frozen=True, slots=True)
class Intervention:
    """The returns of an episode that was continued from one of its moments with a change."""

    what: str
    """Kind of change: `resample` or `replace` (one turn), `remove` (empty messages), `swap` (another policy for an agent)."""
    agents: tuple[str, ...]
    """The changed agents."""
    turn: int | None
    """Index of the changed turn, or of the changed agents' first turn; None if they have none."""
    returns: tuple[Mapping[str, float], ...]
    """Each agent's return, as defined by the algorithm, in every continuation that did not fail."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of a team on one task."""

    task: Task
    seed: int
    agents: tuple[str, ...]
    turns: tuple[Turn, ...] = ()
    """All turns in global time order."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Terminal reward of each agent that the environment scored, in addition to `Turn.reward`."""
    success: float | None = None
    """The team's score in [0, 1]; None if the environment has none."""
    info: Mapping[str, Json] = field(default_factory=dict)
    """The environment's report on the outcome, such as the extracted answer."""
    truncated: bool = False
    """Whether it was ended by a limit on turns or tokens."""
    error: str | None = None
    """Reason for a failure; a failed episode has no reward and is excluded from its group."""
    branches: tuple[Turn, ...] = ()
    """Candidates of tree sampling with which the episode did not continue. `parent` is the index of the turn with which it
    continued; their own indices follow those of `turns`."""
    reward_events: tuple[RewardEvent, ...] = ()
    """Rewards by time, whose sums are in `Turn.reward`."""
    continued: Mapping[str, int] = field(default_factory=dict)
    """Policy → tokens sampled for continuations (tree sampling, interventions), which are not trained on."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Agent → its role, if roles are drawn for each episode. The role of other agents is their name."""
    interventions: tuple[Intervention, ...] = ()
    """Results of the episode's interventions, for algorithms with `Data.interventions`."""
    final: str | None = None
    """The last message that the workflow gave as the team's answer (`Scene.step`); None if it gave none."""

    @property
    def answer(self) -> str:
        """The team's answer: the message that the workflow gave, else the text of the last turn; empty if there are no turns."""
        if self.final is not None:
            return self.final
        return self.turns[-1].words if self.turns else ""

    def by(self, agent: str) -> tuple[Turn, ...]:
        """Return the turns of one agent in time order, which are its trajectory."""
        return tuple(turn for turn in self.turns if turn.agent == agent)

    def rounds(self, agents: Sequence[str] | None = None, *, trained: bool = False) -> list[dict[str, Turn]]:
        """Return agent → turn for each round; round k contains the k-th turn of every agent.

        Agents are in time order. With `agents`, only these agents count, in their order. With `trained`, only trained turns count.
        """
        rounds: list[dict[str, Turn]] = []
        taken: dict[str, int] = {}
        for turn in self.turns:
            if turn.trained or not trained:
                k = taken[turn.agent] = taken.get(turn.agent, -1) + 1
                rounds.extend([{}] if k == len(rounds) else [])
                rounds[k][turn.agent] = turn
        if agents is None:
            return rounds
        chosen = [{name: movers[name] for name in agents if name in movers} for movers in rounds]
        return [movers for movers in chosen if movers]

    def total(self, agent: str) -> float:
        """Return the undiscounted return of one agent."""
        total = 0.0
        for turn in self.turns:
            if turn.agent == agent:
                total += turn.reward
        return total + self.rewards[agent] if agent in self.rewards else total

    def _repr_html_(self) -> str:
        """Return the conversation as an HTML table for notebooks, with all texts escaped."""
        texts = [(turn.agent, turn.text) for turn in self.turns]
        returns = ", ".join(f"{agent} {self.total(agent):.3g}" for agent in self.agents)
        rows = [("task", self.task.question or self.task.id), *texts, ("return", self.error or returns)]
        return as_table(rows)


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as an HTML table, both escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{escape(name)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap"><bdi>{escape(text)}</bdi></td></tr>'
        for name, text in rows
    )
    return f"<table>{cells}</table>"


@dataclass(frozen=True, slots=True)
class Group:
    """All episodes of one task within one step."""

    task: Task
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        others = [episode.task.id for episode in self.episodes if episode.task != self.task]
        assert not others, f"a group has episodes of one task only: {self.task.id} with {others}"

    @property
    def valid(self) -> tuple[Episode, ...]:
        """The episodes that did not fail."""
        return tuple(episode for episode in self.episodes if episode.error is None)


def images_in(messages: Sequence[Message]) -> tuple[Image, ...]:
    """Return all images of a conversation in order."""
    return tuple(image for message in messages for image in message.images)


def conversation(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Return messages as the list of dictionaries that chat templates and endpoints read.

    A message with images has OpenAI's content parts, each image as a `data:` URL.
    """
    found: list[dict[str, Json]] = []
    for message in messages:
        content: Json = message.content
        if message.images:
            images = [{"type": "image_url", "image_url": {"url": image.url}} for image in message.images]
            content = [*images, {"type": "text", "text": message.content}]
        found.append({"role": message.role, "content": content})
    return found
