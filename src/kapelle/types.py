"""The basic data types of kapelle: immutable values that are passed from the sampler to the optimiser.

This module uses only the standard library. The library computes with token ids; the text of a turn is stored only for people who read
it.
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
"""A value that `json.dumps` converts without loss of information."""

Split = Literal["train", "test"]
FinishReason = Literal["stop", "length", "error"]


SIGNATURES: Mapping[str, tuple[bytes, bytes]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n", b""),
    "image/jpeg": (b"\xff\xd8\xff", b""),
    "image/gif": (b"GIF8", b""),
    "image/webp": (b"RIFF", b"WEBP"),
}
"""Mapping from each supported media type to two signatures: the first bytes of a file of this type, and its bytes from the ninth on."""

LARGEST_IMAGE = 20_000_000
"""Maximum size of an image file in bytes."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that an agent reads, stored as the bytes of a file. Two images are equal if their bytes are equal."""

    hash: str
    """The first 32 hexadecimal digits of the SHA-256 hash of the file."""
    media: str
    """Media type of the file, one of the keys of `SIGNATURES`."""
    data: bytes = field(repr=False, compare=False)
    """Content of the file. The field is empty if only the name of the file was recorded."""

    @classmethod
    def of(cls, data: bytes) -> Image:
        """Return an image from the content of a PNG, JPEG, GIF or WebP file.

        Raises ValueError if the file has another format or is too large. Only the first bytes of the file are checked; a damaged
        image raises an error when it is decoded.
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
        """Name of the image file in a run: the hash with the file extension of the media type."""
        return f"{self.hash}.{self.media.removeprefix('image/')}"

    @property
    def url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.media};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of a mixture-of-experts model that were used for each token of a prompt and its completion, except the last token."""

    layers: int
    """Number of transformer blocks with experts."""
    chosen: int
    """Number of experts per token and block."""
    data: bytes = field(repr=False)
    """Indices of the experts as two-byte little-endian integers, sorted by token and then by block."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the format of the OpenAI API."""

    role: str
    content: str
    speaker: str | None = None
    """Name of the agent that wrote the message, or None if the environment or workflow wrote it."""
    images: tuple[Image, ...] = ()
    """Images that are placed before the text of the message."""
    structured: str | None = None
    """The message as JSON in the format of the OpenAI API, including tool calls and `tools` (before the first message that needs them),
    for chat templates with a format for tools. The field `content` contains the same information as text. None if the message has no
    tools."""


def worded(message: Message, wording: Callable[[str], str]) -> Message:
    """Return a copy of the message in which `wording` was applied to the text. Tools are kept unchanged."""
    row = {} if message.structured is None else json.loads(message.structured)
    structured = json.dumps({**row, "content": wording(row["content"])}, ensure_ascii=False) if row else None
    return replace(message, content=wording(message.content), structured=structured)


def as_text(messages: Sequence[Message]) -> str:
    """Return a conversation as one string.

    The result is the content of the message if there is only one, or else the content of each message after its role.
    """
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


@dataclass(frozen=True, slots=True)
class SampledMessage(Message):
    """A completion in the agent's own conversation, with the tokens that were sampled."""

    ids: tuple[int, ...] = ()
    thoughts: int = 0
    """Number of tokens at the beginning of the completion that are thoughts."""


ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "grammar", "endpoint"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on a completion, which is enforced by constrained decoding.

    Tokens that violate the constraint have probability 0, and the turn ends when the completion satisfies the constraint. Two
    constraints are equal if their kinds and texts are equal. Use the class methods to create constraints.
    """

    kind: ConstraintKind
    text: str
    """The JSON schema, the choices as JSON, the regular expression or the grammar. The field is empty for `json_object`. For `endpoint`,
    the field contains fields of a chat request as JSON."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Json]) -> Constraint:
        """Return a constraint to JSON objects that satisfy this schema, with the properties in the order of the schema."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> Constraint:
        """Return a constraint that allows any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return a constraint to strings that match the whole pattern (in Rust's syntax, without look-around or back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Constraint:
        """Return a constraint to one of these strings. The order is kept, and duplicates are removed."""
        return cls(
            "choices", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False, separators=(",", ":"))
        )

    @classmethod
    def endpoint(cls, fields: Mapping[str, Json]) -> Constraint:
        """Return a constraint with fields of a chat request (`tools`, `tool_choice`, …), which the server of an endpoint applies itself."""
        return cls("endpoint", json.dumps(fields))

    @classmethod
    def legal(cls) -> Constraint:
        """Return a constraint to the legal moves that the environment lists in each turn (`environment.KnowsMoves`)."""
        return cls("choices", "legal")

    @property
    def is_legal(self) -> bool:
        """Whether this is the constraint to legal moves."""
        return self == Constraint.legal()

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Return a constraint to strings of this grammar, in llguidance's dialect of Lark (`%json {…}` embeds a JSON schema)."""
        return cls("grammar", lark)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes to the sampling distribution that callers of a served team request. The changes are applied in the same order as in vLLM.

    Such changes are not used in training.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value that is added to the logit of this token."""
    min_tokens: int = 0
    """Minimum number of tokens of a completion without a constraint."""
    repetition_penalty: float = 1.0
    """Factor by which the logits of tokens that occur in the prompt or the completion are divided (if positive) or multiplied (if
    negative)."""
    presence_penalty: float = 0.0
    """Value that is subtracted from the logits of all tokens that occur in the completion."""
    frequency_penalty: float = 0.0
    """Value that is subtracted from the logit of a token for each of its occurrences in the completion."""
    min_p: float = 0.0
    """Minimum probability of a token, as a share of the probability of the most likely token. Less likely tokens are excluded."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a policy call.

    Log-probs are computed under the distribution that these settings define.
    """

    max_tokens: int = 64
    """Maximum number of tokens of a completion, including the end-of-turn token."""
    temperature: float = 1.0
    """Sampling temperature. With 0, decoding is greedy, and log-probs are computed at temperature 1."""
    top_p: float = 1.0
    """Cumulative probability for nucleus sampling: tokens are sampled from the smallest set of tokens with at least this probability.
    With 1, all tokens are kept."""
    top_k: int = 0
    """Number of most likely tokens from which the next token is sampled. With 0, all tokens are kept."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. The tokens of such a string are part of the completion."""
    constraint: Constraint | None = None
    """Constraint of the completion, or None for unconstrained text."""
    adjusted: Adjustments | None = None
    """Changes that a caller has requested, or None if the distribution is defined by the other settings alone."""

    @classmethod
    def from_row(cls, row: Mapping[str, Json]) -> Sampling:
        """Return sampling settings from a dict that `dataclasses.asdict` created. JSON may have converted its tuples to lists."""
        constraint, adjusted = row.get("constraint"), row.get("adjusted")
        own = {**row, "stop": tuple(row["stop"])}
        if adjusted is not None:
            biases = tuple((token, bias) for token, bias in adjusted["logit_bias"])
            own["adjusted"] = Adjustments(**{**adjusted, "logit_bias": biases})
        return cls(**{**own, "constraint": None if constraint is None else Constraint(**constraint)})


@dataclass(frozen=True, slots=True)
class Cast:
    """Another policy or player that takes an agent's role instead of the team's own policy."""

    policy: str
    """Name of the policy that acts; empty if a player of the environment acts (`environment.HasPlayers`)."""
    player: str
    """Name of the opponent in records and results."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment. The task is the same in every process."""

    id: str
    """Identifier that is unique within the environment and the split."""
    question: str
    """Text of the question, which every agent may read. The text is empty for games, where agents read `EpisodeState.observe` instead."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """Data that only the environment reads, such as the correct answer. Agents do not see this data."""
    part: str = ""
    """Name of the environment in a mixture to which the task belongs; empty if there is no mixture. Returns of different environments are
    not comparable, so credit functions can separate them by this name."""
    cast: Mapping[str, Cast] = field(default_factory=dict)
    """Mapping from an agent to the policy or player that replaces the team's policy for this agent. All episodes of a task use the same
    mapping, so that all episodes of a group have the same opponent."""
    system: str = ""
    """System message of the task, which every agent reads after its own system message (`Agent.system`)."""
    messages: tuple[tuple[Message, ...], ...] = ()
    """Messages before each turn of an agent, if the task is a conversation. The field `question` contains the first entry as one string."""
    rendered: bool = False
    """Whether `question` is a complete prompt to which a chat template was already applied. The agent then reads its tokens unchanged."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The question as a list of chat messages."""
        return self.messages[0] if self.messages else (Message("user", self.question),)

    @property
    def environment_players(self) -> Mapping[str, str]:
        """Mapping from each agent in a role that a player of the environment takes to the name of this player."""
        return {agent: each.player for agent, each in self.cast.items() if not each.policy}


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy call, with the prompt, the completion, and the version of the weights that sampled the completion."""

    agent: str
    policy: str
    version: int
    """Number of updates of the weights that sampled this turn. If several versions of the weights sampled it (`versions`), this is the
    version that sampled its last token."""
    weights_hash: str
    """Hash of the weights that sampled this turn."""
    index: int
    """Position of the turn in the time order of all turns of the episode, from 0."""
    completed_before: int
    """Number of turns of the episode that were already complete when the prompt of this turn was created."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob in nats of each completion token under the distribution from which it was sampled."""
    finish_reason: FinishReason
    text: str
    """Text of the completion, without the end-of-turn token."""
    new_messages: tuple[Message, ...] = ()
    """Messages that were added to the agent's conversation since its previous turn."""
    reward: float = 0.0
    """Reward that the agent received between this turn and its next turn."""
    score: float | None = None
    """Score in [0, 1] of this text as its agent's answer, if the workflow requested a score. The score is not part of the rewards."""
    parent: int | None = None
    """Index of the turn with which the episode continued instead of this candidate (tree sampling)."""
    continuation_return: float | None = None
    """Mean return of the agent over the episodes that continue from this turn (tree sampling)."""
    trained: bool = True
    """Whether the turn was sampled by a trained policy. False for frozen agents, opponents and endpoints."""
    versions: tuple[tuple[int, int], ...] = ()
    """Spans of completion tokens that were sampled by the same weights, as pairs of a version and a number of tokens, in order. The tuple
    is empty if all tokens were sampled by the weights `version` (`training.asynchronous`)."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in order."""
    routing: Routing | None = None
    """Experts that were used to sample the turn, if training uses the same experts (`model.routing: replayed`)."""
    constraint: Constraint | None = None
    """Constraint of the completion. Log-probs are computed under the constrained distribution."""
    caller: int | None = None
    """Index of another agent's turn that caused this turn by a tool call, a handoff or a call of a sub-agent. None if no other turn
    caused it or if the cause is unknown (custom workflows, some external programs)."""
    copied: bool = False
    """Whether the turn was sampled in another episode of the group and is shared with this episode. The tokens of a shared turn are
    counted in the other episode (`Data.widths`)."""
    usage: tuple[int, int] | None = None
    """Numbers of prompt tokens and completion tokens that the server of an endpoint reported, or None if the token ids of the turn are
    exact."""

    thoughts: int = 0
    """Number of characters at the beginning of `text` that are thoughts (`<think>…</think>`). Other agents do not read the thoughts."""
    dropped: int = 0
    """Number of messages that compaction removed from the conversation before this turn. If messages were removed, `new_messages` starts
    a new conversation (`episode.compaction`)."""
    summary: bool = False
    """Whether the completion is a summary of the agent's own conversation (`episode.compaction.summary`). Only this agent reads it."""

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.logprobs), "one log-prob for each sampled token"
        assert not self.versions or sum(tokens for _, tokens in self.versions) == len(self.completion_ids)

    @property
    def words(self) -> str:
        """The text without thoughts. The result is empty if the thoughts were truncated."""
        return self.text[self.thoughts :]

    @property
    def token_counts(self) -> tuple[int, int]:
        """Numbers of prompt tokens and completion tokens, as counted by the server of an endpoint if it reported them."""
        return self.usage or (len(self.prompt_ids), len(self.completion_ids))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Spans of tokens that were sampled by the same weights, as pairs of a version and a number of tokens.

        If `versions` is empty, the only span contains all tokens.
        """
        return self.versions or ((self.version, len(self.completion_ids)),)


@dataclass(frozen=True, slots=True)
class RewardEvent:
    """A reward that an agent received during an episode, before its end."""

    agent: str
    after: int
    """Number of turns that had been recorded when the reward was received."""
    reward: float


@dataclass(frozen=True, slots=True)
class Intervention:
    """The returns of an episode that was changed at one moment and continued from there."""

    what: str
    """Kind of change: `resample` or `replace` (a turn is changed), `remove` (messages are empty) or `swap` (another policy acts for an
    agent)."""
    agents: tuple[str, ...]
    """Names of the changed agents."""
    turn: int | None
    """Index of the changed turn. If all turns of the agents change, this is the index of their first turn, or None if they have no
    turns."""
    returns: tuple[Mapping[str, float], ...]
    """Return of each agent, as defined by the algorithm, in every continuation that did not fail."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of a team on one task."""

    task: Task
    seed: int
    agents: tuple[str, ...]
    turns: tuple[Turn, ...] = ()
    """All turns of the episode in time order."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mapping from each agent that receives a terminal reward to this reward, which is added to the rewards in `Turn.reward`."""
    success: float | None = None
    """Score of the team in [0, 1], or None if the environment defines no such score."""
    info: Mapping[str, Json] = field(default_factory=dict)
    """Information about the outcome that the environment reports, such as the extracted answer."""
    truncated: bool = False
    """Whether the episode ended because it reached a limit on turns or tokens."""
    error: str | None = None
    """Reason why the episode failed, or None if it did not fail. A failed episode has no reward and is excluded from its group."""
    branches: tuple[Turn, ...] = ()
    """Candidates of tree sampling with which the episode did not continue. In each candidate, `parent` is the index of the turn with
    which the episode continued. The indices of the candidates follow those of `turns`."""
    reward_events: tuple[RewardEvent, ...] = ()
    """Rewards in time order. Their sums are stored in `Turn.reward`."""
    continued: Mapping[str, int] = field(default_factory=dict)
    """Mapping from each policy to the number of tokens that it sampled for continuations (tree sampling, interventions). Tokens of
    continuations are not trained on."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Mapping from agents to their roles, if roles are drawn for each episode. The role of an agent that is not in the mapping is its
    name."""
    interventions: tuple[Intervention, ...] = ()
    """Results of the interventions in this episode, for algorithms with `Data.interventions`."""
    final: str | None = None
    """The last message that the workflow submitted as the team's answer (`Scene.step`), or None if there was no such message."""

    @property
    def answer(self) -> str:
        """The team's answer: the message that the workflow submitted, or else the text of the last turn.

        The result is empty if there are no turns.
        """
        if self.final is not None:
            return self.final
        return self.turns[-1].words if self.turns else ""

    def by(self, agent: str) -> tuple[Turn, ...]:
        """Return the turns of one agent in time order, which form the trajectory of this agent."""
        return tuple(turn for turn in self.turns if turn.agent == agent)

    def rounds(self, agents: Sequence[str] | None = None, *, trained: bool = False) -> list[dict[str, Turn]]:
        """Return a mapping from agents to turns for each round, where round k contains the k-th turn of every agent.

        The agents of a round are in time order. If `agents` is given, only these agents are included, in the given order. With
        `trained`, only trained turns are included.
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
        """Return the conversation as an HTML table for notebooks. All texts are escaped."""
        texts = [(turn.agent, turn.text) for turn in self.turns]
        returns = ", ".join(f"{agent} {self.total(agent):.3g}" for agent in self.agents)
        rows = [("task", self.task.question or self.task.id), *texts, ("return", self.error or returns)]
        return as_table(rows)


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return an HTML table of names and texts, which are escaped."""
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
    """Return messages as a list of dictionaries, the format that chat templates and endpoints read.

    A message with images consists of content parts in the format of the OpenAI API, with each image as a `data:` URL.
    """
    found: list[dict[str, Json]] = []
    for message in messages:
        content: Json = message.content
        if message.images:
            images = [{"type": "image_url", "image_url": {"url": image.url}} for image in message.images]
            content = [*images, {"type": "text", "text": message.content}]
        found.append({"role": message.role, "content": content})
    return found
