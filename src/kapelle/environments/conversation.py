"""Conversations in which an assistant must find out a user's wishes. The reward is the satisfaction of the user.

The user is a script, or an agent of the team, such as a frozen model. Only the user knows its wishes. The assistant reads the
user's messages, asks questions, and ends the conversation with a line that makes a booking. The environment compares the booking
with the wishes.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kapelle.environment import Outcome, Private, Scripted
from kapelle.environments.base import BaseEnvironment, BaseState, need_movers
from kapelle.environments.questions import (
    Difficulty,
    Flaws,
    Problem,
    check_flaws,
    describe,
    draw_task,
    flawed,
    up_to,
)
from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Json, Message, Split, Task

# -------- Errands of users, in `conversation.toml`


@dataclass(frozen=True, slots=True)
class Errand:
    """A task that an assistant arranges for a user, such as booking a table."""

    wants: str
    """The end of the user's first sentence, which begins with `I would like to`."""
    slots: Mapping[str, Sequence[str]]
    """Mapping from the name of a slot of the booking to the slot's possible values. Each value is a single word."""


ERRANDS: Mapping[str, Errand] = {
    name: Errand(**fields)
    for name, fields in tomllib.loads(
        (files("kapelle.environments") / "conversation.toml").read_text("utf-8")
    ).items()
}
ErrandName = Literal["table", "train", "repair", "parcel"]
Persona = Literal["terse", "open", "talkative"]
"""How a scripted user answers questions. A `terse` user answers one question at a time, an `open` user answers all questions of a
message, and a `talkative` user also states one wish at the beginning."""
SCRIPT = "script"
READ = 2000
"""The maximum number of characters of a message that are searched for questions and bookings."""


class UserConversation(BaseEnvironment, Scripted, Private):
    """Conversations between one user and one or more assistants, who answer in turn."""

    name: Literal["conversation"] = "conversation"
    user: str = SCRIPT
    """The user, which is `script` or the name of an agent (a frozen model, an endpoint or an earlier version of a policy)."""
    errands: tuple[ErrandName, ...] = Field(default=("table", "train", "repair", "parcel"), min_length=1)
    """The kinds of errands. The errand of each user is sampled uniformly."""
    difficulty: Annotated[Difficulty, up_to(4)] = (2, 4)
    """The minimum and maximum number of a user's wishes, from 1 to 4."""
    things: int = Field(default=4, ge=1, le=4)
    """The number of slots of a booking. The first slots of each errand are used; every errand has four slots."""
    personas: tuple[Persona, ...] = Field(default=("terse", "open", "talkative"), min_length=1)
    """The styles of users. The style of each user is sampled uniformly."""
    max_turns: int = Field(default=8, ge=1)
    """The maximum number of messages from assistants. After the last of these messages, the conversation ends, even if the last
    booking is incorrect."""
    patience: int = Field(default=1, ge=0)
    """The number of incorrect bookings that a scripted user tolerates. The user leaves after the next incorrect booking."""
    satisfaction: Literal["goals", "user"] = "goals"
    """The reward before costs. `goals`: the fraction of wishes that the last booking satisfies. `user`: the rating from 0 to 10 that
    the user's agent gives, divided by 10."""
    turn_cost: float = Field(default=0.02, ge=0.0, le=1.0)
    """The cost that is subtracted from the reward for each message from an assistant. The reward is never below 0."""
    view: Literal["transcript", "latest"] = "transcript"
    """The part of the conversation that an agent reads: the whole `transcript`, or only the `latest` messages, for the workflow `play`
    with `memory: conversation`."""
    wording: Literal["full", "short"] = "full"
    """The language of prompts and scripted messages. `full`: complete sentences. `short`: only a few characters, for a very small
    model."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a user's wishes
    does not depend on the seed."""
    flaws: Flaws = Field(default_factory=dict)
    """Mapping from an assistant to the fraction of its demonstrations in which it guesses a booking without asking the user."""

    @model_validator(mode="after")
    def _possible(self) -> UserConversation:
        if self.difficulty[1] > self.things:
            raise ValueError(
                f"`difficulty` allows {self.difficulty[1]} wishes, but `things` is {self.things}. Increase `things` or reduce `difficulty`."
            )
        if self.satisfaction == "user" and self.user == SCRIPT:
            raise ValueError(
                "`satisfaction: user` needs an agent as the user. Set `user` to its name, or set `satisfaction: goals`."
            )
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the generated users of each split. A hash of a user's wishes determines the split."""
        return describe(f"users' wishes ({', '.join(self.errands)})", self.difficulty)

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the user's agent is not in the team or is the only agent of the team."""
        check_flaws(self.flaws, agents)
        if self.user != SCRIPT and self.user not in agents:
            raise ConfigError(
                f"`environment.user: {self.user}` is not an agent of the team ({', '.join(agents)}). Name an agent, or set "
                f"`environment.user: {SCRIPT}`.{did_you_mean(self.user, agents)}"
            )
        if not [agent for agent in agents if agent != self.user]:
            raise ConfigError(f"The user, '{self.user}', is the only agent of the team. Add an assistant.")

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index: a user with an errand, wishes and a style."""
        return draw_task(self.name, self.seed, split, index, self.difficulty, self._user)

    def _user(self, draw: random.Random, level: int) -> Problem:
        errand = draw.choice(self.errands)
        slots = self._slots(errand)
        matters = sorted(draw.sample(list(slots), level), key=list(slots).index)
        wishes = {slot: draw.choice(slots[slot]) for slot in matters}
        persona = draw.choice(self.personas)
        first = draw.choice(matters) if persona == "talkative" else None
        data = {"errand": errand, "wishes": wishes, "persona": persona, "told": first}
        return Problem("", data, f"{errand} {wishes}")

    def _slots(self, errand: str) -> Mapping[str, Sequence[str]]:
        """Return the slots of a booking with their possible values."""
        return dict(list(ERRANDS[errand].slots.items())[: self.things])

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return the user's wishes in the form in which the user's agent reads them. The result is empty for all other agents."""
        return (self.wishes(task),) if agent == self.user else ()

    def wishes(self, task: Task) -> str:
        """Return a description of the user's wishes. Only the user's agent reads it."""
        listed = "; ".join(f"{slot}: {value}" for slot, value in task.data["wishes"].items())
        return (
            f"wish {listed}" if self.wording == "short" else f"Your wishes, which you alone know: {listed}."
        )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ConversationState:
        """Start a conversation and return its state."""
        return ConversationState(self, task, agents)

    # -------- Instructions

    def assistants_head(self, task: Task) -> str:
        """Return the instructions of an assistant, which contain the slots and the format of a booking."""
        errand = str(task.data["errand"])
        slots = list(self._slots(errand))
        if self.wording == "short":
            return f"{errand}: {' '.join(slots)}"
        form = "; ".join(f"{slot}=…" for slot in slots[:2])
        return (
            f"You serve a user who would like to {ERRANDS[errand].wants}. Find out what matters to the user; it may be: "
            f"{', '.join(slots)}. When you know, write one line with all of it:\nBOOK {form}"
        )

    def users_head(self, task: Task) -> str:
        """Return the instructions of the user's agent."""
        if self.wording == "short":
            return self.wishes(task)
        return (
            f"You are a {task.data['persona']} user who would like to {ERRANDS[str(task.data['errand'])].wants}. "
            f"{self.wishes(task)}\nSay what you would like to do, and name a wish when you are asked about it. The assistant "
            "ends with a line that begins with BOOK. If it is as you wish, thank and write GOODBYE; if not, say what is wrong."
        )

    # -------- The scripted user

    def opening(self, task: Task) -> str:
        """Return the first message of a scripted user."""
        first = task.data["told"]
        wish = "" if first is None else self._wish(task, first)
        if self.wording == "short":
            return wish or "hi"
        return f"Hello, I would like to {ERRANDS[str(task.data['errand'])].wants}. {wish}".rstrip()

    def _wish(self, task: Task, slot: str) -> str:
        value = task.data["wishes"].get(slot)
        if value is None:
            return f"{slot}: any" if self.wording == "short" else f"As to the {slot}: any is fine."
        return f"{slot}: {value}" if self.wording == "short" else f"As to the {slot}: {value}."

    def answer(self, task: Task, text: str) -> str:
        """Return the scripted user's reply to a message: the wishes that it asks about, an error in its booking, or a goodbye."""
        booked, short = booking(text), self.wording == "short"
        wishes = task.data["wishes"]
        if booked is not None:
            wrong = [slot for slot, value in wishes.items() if booked.get(slot) != value.casefold()]
            if not wrong:
                return "bye" if short else "Thank you, that is what I wanted. GOODBYE"
            return f"no {wrong[0]}" if short else f"No, something is wrong with the {wrong[0]}."
        topics = self._topics(task, text)
        if not topics:
            return "?" if short else "What would you like to know?"
        answered = topics[:1] if task.data["persona"] == "terse" else topics
        return (" " if not short else ",").join(self._wish(task, slot) for slot in answered)

    def _topics(self, task: Task, text: str) -> list[str]:
        """Return the slots that a text mentions by name or value, in order of their first mention."""
        words = re.findall(r"[a-z0-9:]+", text[:READ].casefold())
        slots = self._slots(str(task.data["errand"]))
        place = {word.strip(":"): k for k, word in reversed(list(enumerate(words)))}
        found = {
            slot: [place[word] for word in (slot, *map(str.casefold, values)) if word in place]
            for slot, values in slots.items()
        }
        return sorted((slot for slot, places in found.items() if places), key=lambda slot: min(found[slot]))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a demonstration for the user or for an assistant.

        The user answers the last message. An assistant asks about each slot and then makes a booking that matches the replies.
        """
        short = self.wording == "short"
        read = [message.content for message in messages if message.role == "user"]
        if agent == self.user:
            last = read[-1] if read else ""
            text = re.split(r"^Assistant[^:\n]*: ", last, flags=re.MULTILINE)[-1]
            if RATE in last:
                return "10"
            return self.opening(task) if self.users_head(task) in text else self.answer(task, text)
        slots = self._slots(str(task.data["errand"]))
        known = dict(re.findall(rf"\b({'|'.join(slots)}): ([\w:]*\w)", "\n".join(read)))
        unknown = [slot for slot in slots if slot not in known]
        if flawed(self.flaws, agent, seed):
            known |= {slot: random.Random(f"{seed}/{slot}").choice(slots[slot]) for slot in unknown}
            unknown = []
        if unknown:
            return f"{unknown[0]}?" if short else f"What about the {unknown[0]}?"
        pairs = [f"{slot}={known[slot]}" for slot in slots if known[slot] != "any"]
        return f"BOOK {('; ', ' ')[short].join(pairs)}"


_BOOK = re.compile(r"^[ \t*>-]*BOOK\b[: \t]*(?P<pairs>[^\n]*)", re.IGNORECASE | re.MULTILINE)
_PAIR = re.compile(r"(\w+) ?= ?([\w:]*\w)")
RATE = "How satisfied are you, from 0 to 10?"
"""The last question to the user's agent if `satisfaction` is `user`."""
_NUMBER = re.compile(r"(?<![\d.,-])(10|\d)(?![\d]|[.,]\d)")


def booking(text: str) -> dict[str, str] | None:
    """Return the booking on the last line that begins with BOOK, or None if there is no such line.

    The booking is a mapping from slot to value, both in lower case.
    """
    lines = list(_BOOK.finditer(text[:READ]))
    if not lines:
        return None
    return {slot.casefold(): value.casefold() for slot, value in _PAIR.findall(lines[-1]["pairs"])}


def rating(text: str) -> float | None:
    """Return the first number from 0 to 10 in a text, divided by 10. Returns None if there is no such number."""
    found = _NUMBER.search(text[:READ])
    return None if found is None else int(found[1]) / 10


class ConversationState(BaseState):
    """The state of one conversation."""

    def __init__(self, settings: UserConversation, task: Task, agents: Sequence[str]) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._assistants = tuple(agent for agent in self.agents if agent != settings.user)
        self._messages: list[tuple[str, str]] = []
        """The messages so far, as pairs (writer, text). The writer `script` is the scripted user."""
        self._read = dict.fromkeys(self.agents, 0)
        """Mapping from an agent to the number of messages up to and including the last message that it wrote."""
        self._answers = 0
        self._wrong = 0
        self._met = 0.0
        self._booked: Json = None
        self._ended: Literal["user", "limit"] | None = None
        self._rates = False
        self._rating: float | None = None
        if settings.user == SCRIPT:
            self._messages.append((SCRIPT, settings.opening(task)))

    def _label(self, who: str) -> str:
        if who in (self._settings.user, SCRIPT):
            return "User"
        return "Assistant" if len(self._assistants) == 1 else f"Assistant {who}"

    def observe(self, agent: str) -> str:
        """Return the instructions and messages for an agent. Only the user's agent reads the wishes."""
        settings, latest = self._settings, self._settings.view == "latest"
        start = self._read[agent] if latest else 0
        lines = [
            # With only two writers, no label is needed.
            text if latest and len(self._assistants) == 1 else f"{self._label(who)}: {text}"
            for who, text in self._messages[start:]
            if not latest or who != agent
        ]
        is_user = agent == settings.user
        if start == 0:
            head = settings.users_head(self.task) if is_user else settings.assistants_head(self.task)
            lines.insert(0, head)
        if is_user and self._rates:
            lines.append(f"{RATE} Answer with the number.")
        return "\n".join(lines)

    def movers(self) -> tuple[str, ...]:
        """Return the agent that moves: the user's agent or the next assistant. Returns an empty tuple after the end of the conversation."""
        if self.over:
            return ()
        user = self._settings.user
        if user != SCRIPT and (self._rates or not self._messages or self._messages[-1][0] != user):
            return (user,)
        return (self._assistants[self._answers % len(self._assistants)],)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Add one message to the conversation. Raises EpisodeError if any agent other than the mover acts."""
        movers = self.movers()
        need_movers(actions, movers)
        [(agent, text)] = actions.items()
        if self._rates:
            self._rating = rating(text)
            self._end()
            return {}
        self._messages.append((agent, text))
        self._read[agent] = len(self._messages)
        if agent == self._settings.user:
            # The user writes the last message, even after the assistants' last allowed message.
            if re.search(r"\b(goodbye|bye)\b", text[:READ], re.IGNORECASE):
                self._leave("user")
            elif self._answers >= self._settings.max_turns:
                self._leave("limit")
            return {}
        self._answers += 1
        booked = booking(text)
        wishes = self.task.data["wishes"]
        if booked is not None:
            self._booked = dict(booked)
            self._met = sum(booked.get(slot) == value.casefold() for slot, value in wishes.items()) / len(
                wishes
            )
        if self._settings.user == SCRIPT:
            self._messages.append((SCRIPT, self._settings.answer(self.task, text)))
            self._wrong += booked is not None and self._met < 1.0
            if (booked is not None and self._met == 1.0) or self._wrong > self._settings.patience:
                self._leave("user")
            elif self._answers >= self._settings.max_turns:
                self._leave("limit")
        return {}

    def _leave(self, why: Literal["user", "limit"]) -> None:
        """End the conversation. If the user's rating is needed, the user's agent is asked for the rating first."""
        self._ended = why
        if self._settings.satisfaction == "user":
            self._rates = True
        else:
            self._end()

    def _end(self) -> None:
        self.over = True
        content = self._met if self._settings.satisfaction == "goals" else self._rating or 0.0
        satisfied = max(0.0, content - self._settings.turn_cost * self._answers)
        self.rewards = dict.fromkeys(self.agents, satisfied)
        self.success = self._met

    def outcome(self) -> Outcome:
        """Return the outcome with the satisfaction as the reward. An unfinished conversation is truncated and has no rewards."""
        info: dict[str, Json] = {
            **{key: self.task.data[key] for key in ("errand", "persona", "difficulty")},
            "wishes_met": self._met,
            "booked": self._booked,
            "answers": self._answers,
            "ended_by": self._ended,
        }
        if self._settings.satisfaction == "user":
            info["rating"] = self._rating
        return Outcome(
            self.rewards, self.success if self.over else 0.0, info, truncated=self._ended != "user"
        )
