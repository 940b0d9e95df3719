"""The nouns of kapelle: frozen values that flow from the sampler to the optimiser.

Standard library only. Token ids are the truth: text is kept beside them for people.
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
"""A value that `json.dumps` accepts without losing anything."""

Split = Literal["train", "test"]
FinishReason = Literal["stop", "length", "error"]


SIGNATURES: Mapping[str, tuple[bytes, bytes]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n", b""),
    "image/jpeg": (b"\xff\xd8\xff", b""),
    "image/gif": (b"GIF8", b""),
    "image/webp": (b"RIFF", b"WEBP"),
}
"""Media type → how a file of it begins, and what stands from its ninth byte on."""

LARGEST_IMAGE = 20_000_000
"""Most bytes of one image's file."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that an agent sees, as a file's bytes. Two are equal if their bytes are."""

    hash: str
    """The first 32 hex digits of the SHA-256 of its bytes."""
    media: str
    """One of `SIGNATURES`."""
    data: bytes = field(repr=False, compare=False)
    """The file; empty where only its name was recorded."""

    @classmethod
    def of(cls, data: bytes) -> Image:
        """Return the image that a PNG, JPEG, GIF or WebP file holds; ValueError for other bytes, or too many.

        Only the first bytes are looked at; whether the rest is sound shows when the image is read.
        """
        if len(data) > LARGEST_IMAGE:
            raise ValueError(
                f"An image has {len(data):,} bytes; at most {LARGEST_IMAGE:,} are read. Make it smaller."
            )
        for media, (begins, ninth) in SIGNATURES.items():
            if data.startswith(begins) and data[8:].startswith(ninth):
                return cls(hashlib.sha256(data).hexdigest()[:32], media, bytes(data))
        raise ValueError(
            "An image's bytes are no PNG, JPEG, GIF or WebP file. Give the bytes of such a file, as it lies on a disk."
        )

    @property
    def file(self) -> str:
        """Name of its file in a run: the hash, with the ending of its type."""
        return f"{self.hash}.{self.media.removeprefix('image/')}"

    @property
    def url(self) -> str:
        """The image as a `data:` URL, which holds all of it."""
        return f"data:{self.media};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts of a mixture read each token of a prompt and its completion, all but the last one."""

    layers: int
    """Blocks with experts."""
    chosen: int
    """Experts of a token in each of them."""
    data: bytes = field(repr=False)
    """Their numbers, two bytes each, the lower one first: token by token, block by block."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in OpenAI's shape."""

    role: str
    content: str
    speaker: str | None = None
    """Name of the agent that wrote it; None for a message that the environment or workflow wrote."""
    images: tuple[Image, ...] = ()
    """Pictures that stand before its text."""
    structured: str | None = None
    """The message as JSON in OpenAI's shape, with tool calls and `tools` (before the first message that needs them), for chat
    templates that write these in a form of their own; `content` says the same in words. None where it says no more."""


def worded(message: Message, wording: Callable[[str], str]) -> Message:
    """Return the same message with its text in other words, such as inside a prompt; tools stay with it."""
    row = {} if message.structured is None else json.loads(message.structured)
    structured = json.dumps({**row, "content": wording(row["content"])}, ensure_ascii=False) if row else None
    return replace(message, content=wording(message.content), structured=structured)


def as_text(messages: Sequence[Message]) -> str:
    """Return a conversation as one text: the content of a single message, or each content after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


@dataclass(frozen=True, slots=True)
class Said(Message):
    """An answer in the agent's own conversation, with the tokens that it sampled."""

    ids: tuple[int, ...] = ()
    thoughts: int = 0
    """How many of them, from the first one on, are thoughts."""


ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a completion has to look like: where a token would break this, its probability is 0.

    The turn ends exactly where the text is complete. Two are equal if their kinds and texts are; made by the methods below.
    """

    kind: ConstraintKind
    text: str
    """The schema or the choices as JSON, the regular expression, or the grammar; empty for `json_object`."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Json]) -> Constraint:
        """Return: JSON that this schema describes, properties in the schema's order."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def json_object(cls) -> Constraint:
        """Return: any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return: a text that the whole regular expression matches (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Constraint:
        """Return: one of these texts, each once, in their order."""
        return cls(
            "choices", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False, separators=(",", ":"))
        )

    @classmethod
    def legal(cls) -> Constraint:
        """Return: one of the moves that the world lists when the agent is to move (`environment.KnowsMoves`)."""
        return cls("choices", "legal")

    @property
    def is_legal(self) -> bool:
        """Whether it stands for the moves that the world will list."""
        return self == Constraint.legal()

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Return: a text of this grammar, in llguidance's form of Lark (`%json {…}` embeds a schema)."""
        return cls("grammar", lark)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one policy call samples; log-probs are those of the distribution that this describes."""

    max_tokens: int = 64
    """Most tokens that one completion may have, the end-of-turn token included."""
    temperature: float = 1.0
    """0 is greedy: the log-probs are then those of the untempered distribution."""
    top_p: float = 1.0
    """Smallest set of tokens whose probabilities reach this; 1 keeps all."""
    top_k: int = 0
    """0 keeps all tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens that form them are part of it."""
    constraint: Constraint | None = None
    """What the completion has to look like; None leaves it free."""

    @classmethod
    def from_row(cls, row: Mapping[str, Json]) -> Sampling:
        """Return the sampling of which `dataclasses.asdict` made this row, and JSON perhaps lists of its tuples."""
        constraint = row.get("constraint")
        own = {**row, "stop": tuple(row["stop"])}
        return cls(**{**own, "constraint": None if constraint is None else Constraint(**constraint)})


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays an agent's seat in place of the team's own policy: a member of a league."""

    policy: str
    """The policy that speaks; empty where the environment plays the seat itself (`environment.PlaysSeats`)."""
    player: str
    """The member's name, for records and results."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment: the same value in every process."""

    id: str
    """Unique within the environment and its split."""
    question: str
    """What every agent may read; empty for games, where `World.observe` gives the text."""
    data: Mapping[str, Json] = field(default_factory=dict)
    """What only the environment reads, such as the correct answer. Hidden from agents."""
    part: str = ""
    """The environment of a mixture that it belongs to; empty outside of one. Returns of different parts are not
    comparable, so credit can keep them apart."""
    cast: Mapping[str, Cast] = field(default_factory=dict)
    """Agent → who plays its seat instead of the policy of the team map. All episodes of a task have the same cast, so
    that a group compares attempts against one opponent."""
    system: str = ""
    """The task's own system message, such as a row's: every agent reads it below that of its own (`Agent.system`)."""
    messages: tuple[tuple[Message, ...], ...] = ()
    """What an agent reads before each of its turns, where that is a conversation; `question` is the first one as one text."""
    rendered: bool = False
    """Whether `question` is a whole prompt, chat template included. The agent then reads its tokens as they are."""

    @property
    def asked(self) -> tuple[Message, ...]:
        """The question as the messages of a conversation."""
        return self.messages[0] if self.messages else (Message("user", self.question),)

    @property
    def seats_of_world(self) -> Mapping[str, str]:
        """Agent → the player of the environment that has its seat."""
        return {agent: each.player for agent, each in self.cast.items() if not each.policy}


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy call: what the agent read, what it answered, and which weights answered."""

    agent: str
    policy: str
    version: int
    """Number of updates behind the weights that sampled this turn; of its last token, where `versions` names several."""
    weights_hash: str
    """Content hash of those weights."""
    index: int
    """Position in the episode's global time order, from 0."""
    seen: int
    """How many turns of the episode were complete when this one's prompt was fixed."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-prob of each completion token (nats), of the distribution really sampled."""
    finish_reason: FinishReason
    text: str
    """The completion as text, without the end-of-turn token."""
    heard: tuple[Message, ...] = ()
    """The messages that entered the agent's context since its last turn."""
    reward: float = 0.0
    """What the environment paid this agent between this turn and its next one."""
    score: float | None = None
    """The score in [0, 1] of this text as its agent's answer, where a workflow asked for one; rewards are apart."""
    parent: int | None = None
    """Index of the turn that the episode continued with in place of this candidate (tree sampling)."""
    worth: float | None = None
    """Mean return of its agent over the episodes that continue from it (tree sampling)."""
    trained: bool = True
    """False for frozen agents, opponents and endpoints."""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of each run of completion tokens that the same weights sampled, in order; empty where `version`
    sampled them all (`training.partial_rollouts`)."""
    images: tuple[Image, ...] = ()
    """All pictures in its prompt, in their order there."""
    routing: Routing | None = None
    """The experts that sampled it, where they are to be trained again (`model.routing: replayed`)."""
    constraint: Constraint | None = None
    """What the completion had to look like: its log-probs are those of the distribution over what was allowed."""
    caller: int | None = None
    """Index of another agent's turn that called for this one: by a tool call, a handoff, or as its sub-agent. None where nobody
    did, or where it is unknown (workflows of one's own; programs that show no sign of it)."""
    copied: bool = False
    """True if another episode of its group sampled it for both: its tokens are counted there (`Data.widths`)."""
    usage: tuple[int, int] | None = None
    """Tokens read and written as an endpoint's server counted them; None where the ids above are what was read and written."""

    thoughts: int = 0
    """How many characters of `text`, from the first one on, are thoughts (`<think>…</think>`): other agents do not read them."""
    dropped: int = 0
    """How many messages of its conversation were dropped before this turn, which `heard` then begins anew (`episode.compaction`)."""

    def __post_init__(self) -> None:
        assert len(self.completion_ids) == len(self.logprobs), "one log-prob for each sampled token"
        assert not self.versions or sum(tokens for _, tokens in self.versions) == len(self.completion_ids)

    @property
    def words(self) -> str:
        """The text without thoughts; empty where the thoughts were cut off."""
        return self.text[self.thoughts :]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each run of tokens that the same weights sampled: `versions`, or the one run."""
        return self.versions or ((self.version, len(self.completion_ids)),)


@dataclass(frozen=True, slots=True)
class Payment:
    """What the environment paid an agent at one moment of an episode, before its end."""

    agent: str
    after: int
    """How many turns were recorded by then."""
    reward: float


@dataclass(frozen=True, slots=True)
class Intervention:
    """An episode that was played on from one of its moments, with something changed there."""

    what: str
    """`resample` or `replace` (one turn), `remove` (agents say nothing), `swap` (another policy speaks for an agent)."""
    agents: tuple[str, ...]
    """Who was changed."""
    turn: int | None
    """Index of the turn that was sampled anew or replaced, or of the first one that the changed agents would have taken; None
    where they took none."""
    returns: tuple[Mapping[str, float], ...]
    """Each agent's return, as the algorithm counts it, in every continuation that did not fail."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt of a team at one task."""

    task: Task
    seed: int
    agents: tuple[str, ...]
    turns: tuple[Turn, ...] = ()
    """All turns in global time order."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Terminal reward of each agent that the environment scored, on top of `Turn.reward`."""
    success: float | None = None
    """The team's score in [0, 1]; None where the environment has none."""
    info: Mapping[str, Json] = field(default_factory=dict)
    """What the environment reports about the outcome, such as the extracted answer."""
    truncated: bool = False
    """True when a limit of turns or tokens ended it, not the task."""
    error: str | None = None
    """Why the episode failed; a failed episode has no reward and leaves its group."""
    branches: tuple[Turn, ...] = ()
    """Candidates of tree sampling that the episode did not continue with. `parent` is the index of the turn that it
    did continue with; their own indices follow those of `turns`."""
    payments: tuple[Payment, ...] = ()
    """When agents were paid what `Turn.reward` adds up, in time order."""
    continued: Mapping[str, int] = field(default_factory=dict)
    """Policy → tokens sampled to continue from candidates (tree sampling) and interventions; nothing is trained on them."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Agent → its seat, where seats are drawn anew for each episode. An agent that is not listed has only one
    role: its name."""
    interventions: tuple[Intervention, ...] = ()
    """What became of it where something was changed; only for algorithms that ask (`Data.interventions`)."""
    final: str | None = None
    """The text that the workflow named as the team's answer (`Scene.step`), the last one; None where it named none."""

    @property
    def answer(self) -> str:
        """The team's answer: the text that the workflow named, else the last that was said; empty where nobody spoke."""
        if self.final is not None:
            return self.final
        return self.turns[-1].words if self.turns else ""

    def by(self, agent: str) -> tuple[Turn, ...]:
        """Return the turns of one agent in time order: its trajectory, as a view."""
        return tuple(turn for turn in self.turns if turn.agent == agent)

    def rounds(self, agents: Sequence[str] | None = None, *, trained: bool = False) -> list[dict[str, Turn]]:
        """Return, for each round, who took which turn: the k-th turns of all agents are one round.

        Agents stand in time order; with `agents` only those count, in that order. With `trained` only turns that are
        trained on count.
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
        paid = 0.0
        for turn in self.turns:
            if turn.agent == agent:
                paid += turn.reward
        return paid + self.rewards[agent] if agent in self.rewards else paid

    def _repr_html_(self) -> str:
        """Return the conversation as a table, for notebooks; whatever was said is text."""
        said = [(turn.agent, turn.text) for turn in self.turns]
        paid = ", ".join(f"{agent} {self.total(agent):.3g}" for agent in self.agents)
        rows = [("task", self.task.question or self.task.id), *said, ("return", self.error or paid)]
        return as_table(rows)


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as an HTML table; names and texts are escaped."""
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
        wrong = [e.task.id for e in self.episodes if e.task != self.task]
        assert not wrong, f"a group holds one task only: {self.task.id} with {wrong}"

    @property
    def valid(self) -> tuple[Episode, ...]:
        """The episodes that did not fail."""
        return tuple(episode for episode in self.episodes if episode.error is None)


def images_in(messages: Sequence[Message]) -> tuple[Image, ...]:
    """Return all pictures of a conversation in their order."""
    return tuple(image for message in messages for image in message.images)


def conversation(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Return messages as the list of dictionaries that chat templates and endpoints read.

    A message with images has OpenAI's content parts, each image as a `data:` URL.
    """
    said: list[dict[str, Json]] = []
    for message in messages:
        content: Json = message.content
        if message.images:
            shown = [{"type": "image_url", "image_url": {"url": image.url}} for image in message.images]
            content = [*shown, {"type": "text", "text": message.content}]
        said.append({"role": message.role, "content": content})
    return said


def image_of_part(part: Mapping[str, Json]) -> Image:
    """Return the image of one of OpenAI's content parts, `{"type": "image_url", "image_url": {"url": "data:…"}}`.

    Only `data:` URLs are read: an address would have this machine fetch what somebody else names, a path what it holds.
    Raises ValueError for another part or URL, or for bytes that are no image.
    """
    named = part.get("image_url") if part.get("type") == "image_url" else None
    url = named.get("url") if isinstance(named, Mapping) else named
    if not isinstance(url, str):
        raise ValueError(  # noqa: TRY004 - JSON of another form is a wrong value
            'A part of a message is no image. Write {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}.'
        )
    head, _, content = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(
            f"An image is given as '{url[:60]}', which is not fetched: kapelle reads no addresses and paths from messages. Send the "
            "file itself, as `data:image/png;base64,…`."
        )
    if len(content) > 4 * LARGEST_IMAGE // 3 + 4:
        raise ValueError(f"An image has more than {LARGEST_IMAGE:,} bytes. Make it smaller.")
    try:
        data = base64.b64decode(content, validate=True)
    except ValueError:
        raise ValueError("An image's `data:` URL holds no base64.") from None
    return Image.of(data)
