"""Conversations with a user who wants something: an assistant finds out what, and is paid by how satisfied the user is.

The user is a script, or an agent of the team, such as a frozen model. What it wants is known to it alone; the assistant
reads only what the user says, asks, and ends with one line that says what it books. The environment compares that line
with the user's wishes.
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
from kapelle.environments.base import BaseEnvironment, BaseWorld, need_movers
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

# -------- What can be wanted: errands, each with four things that may matter, and the values of each


@dataclass(frozen=True, slots=True)
class Errand:
    """Something to arrange for a user."""

    wants: str
    """What the user says first, after `I would like to`."""
    slots: Mapping[str, Sequence[str]]
    """Name of a thing that may matter → its values, each one word."""


ERRANDS: Mapping[str, Errand] = {
    name: Errand(**fields)
    for name, fields in tomllib.loads(
        (files("kapelle.environments") / "conversation.toml").read_text("utf-8")
    ).items()
}
ErrandName = Literal["table", "train", "repair", "parcel"]
Persona = Literal["terse", "open", "talkative"]
"""`terse`: answers one thing at a time. `open`: answers all that was asked. `talkative`: also names one wish at once."""
SCRIPT = "script"
READ = 2000
"""Characters of a text in which questions and bookings are looked for."""


class UserConversation(BaseEnvironment, Scripted, Private):
    """One errand for one user; all agents but the user are assistants, who answer it in turn."""

    name: Literal["conversation"] = "conversation"
    user: str = SCRIPT
    """`script`, or the name of the agent that is the user: a frozen model, an endpoint, a past self."""
    errands: tuple[ErrandName, ...] = Field(default=("table", "train", "repair", "parcel"), min_length=1)
    """What users want, drawn evenly."""
    difficulty: Annotated[Difficulty, up_to(4)] = (2, 4)
    """Fewest and most things that matter to a user, 1 to 4."""
    things: int = Field(default=4, ge=1, le=4)
    """Things that an assistant may have to find out: the first so many of an errand's four."""
    personas: tuple[Persona, ...] = Field(default=("terse", "open", "talkative"), min_length=1)
    """How users talk, drawn evenly."""
    max_turns: int = Field(default=8, ge=1)
    """How often the user is answered; the conversation then ends, whatever was booked."""
    patience: int = Field(default=1, ge=0)
    """Wrong bookings after which a scripted user still goes on; it leaves with the next one."""
    satisfaction: Literal["goals", "user"] = "goals"
    """What is paid: the share of wishes that the last booking meets, or a number from 0 to 10 that the user's agent is asked for."""
    turn_cost: float = Field(default=0.02, ge=0.0, le=1.0)
    """What each answer of an assistant takes off; nothing is paid below 0."""
    view: Literal["transcript", "latest"] = "transcript"
    """What an agent reads: all that was said, or what is new to it, for `play` with `memory: conversation`."""
    wording: Literal["full", "short"] = "full"
    """Sentences, or as few characters as a tiny model needs."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the wishes stays."""
    flaws: Flaws = Field(default_factory=dict)
    """Assistant → share of its demonstrations that book at once, by guessing."""

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> UserConversation:
        if self.difficulty[1] > self.things:
            raise ValueError(
                f"`difficulty` goes to {self.difficulty[1]}, and an errand has {self.things} `things`. Set `things` higher, or "
                "`difficulty` lower."
            )
        return self

    @model_validator(mode="after")
    def _somebody_to_ask(self) -> UserConversation:
        if self.satisfaction == "user" and self.user == SCRIPT:
            raise ValueError(
                "`satisfaction: user` asks an agent for a number, and the user is a script. Name the user's agent in "
                "`user`, or set `satisfaction: goals`."
            )
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """Generated; a hash of each user's wishes decides their split."""
        return describe(f"users' wishes ({', '.join(self.errands)})", self.difficulty)

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError where the user is no agent of the team, or there is nobody else."""
        check_flaws(self.flaws, agents)
        if self.user != SCRIPT and self.user not in agents:
            raise ConfigError(
                f"`environment.user: {self.user}` names no agent of the team ({', '.join(agents)}). Name one, or set "
                f"`environment.user: {SCRIPT}`.{did_you_mean(self.user, agents)}"
            )
        if not [agent for agent in agents if agent != self.user]:
            raise ConfigError(f"The team has only the user, '{self.user}'. Add an agent that it talks to.")

    def task(self, split: Split, index: int) -> Task:
        """Return a user: its errand, wishes and persona."""
        return draw_task(self.name, self.seed, split, index, self.difficulty, self._user)

    def _user(self, draw: random.Random, level: int) -> Problem:
        errand = draw.choice(self.errands)
        slots = self._slots(errand)
        matters = sorted(draw.sample(list(slots), level), key=list(slots).index)
        wishes = {slot: draw.choice(slots[slot]) for slot in matters}
        persona = draw.choice(self.personas)
        told = draw.choice(matters) if persona == "talkative" else None
        data = {"errand": errand, "wishes": wishes, "persona": persona, "told": told}
        return Problem("", data, f"{errand} {wishes}")

    def _slots(self, errand: str) -> Mapping[str, Sequence[str]]:
        """Return what may matter, with the values of each."""
        return dict(list(ERRANDS[errand].slots.items())[: self.things])

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return the user's wishes as it reads them."""
        return (self.wishes(task),) if agent == self.user else ()

    def wishes(self, task: Task) -> str:
        """Return what the user's agent reads about its wishes, and nobody else."""
        listed = "; ".join(f"{slot}: {value}" for slot, value in task.data["wishes"].items())
        return (
            f"wish {listed}" if self.wording == "short" else f"Your wishes, which you alone know: {listed}."
        )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ConversationWorld:
        """Begin a conversation."""
        return ConversationWorld(self, task, agents)

    # -------- How everybody is told what to do

    def assistants_head(self, task: Task) -> str:
        """Return what an assistant reads first: what it may have to find out, and how it books."""
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
        """Return what the user's agent reads first."""
        if self.wording == "short":
            return self.wishes(task)
        return (
            f"You are a {task.data['persona']} user who would like to {ERRANDS[str(task.data['errand'])].wants}. "
            f"{self.wishes(task)}\nSay what you would like to do, and name a wish when you are asked about it. The assistant "
            "ends with a line that begins with BOOK. If it is as you wish, thank and write GOODBYE; if not, say what is wrong."
        )

    # -------- The scripted user

    def opening(self, task: Task) -> str:
        """Return what a scripted user says first."""
        told = task.data["told"]
        wish = "" if told is None else self._wish(task, told)
        if self.wording == "short":
            return wish or "hi"
        return f"Hello, I would like to {ERRANDS[str(task.data['errand'])].wants}. {wish}".rstrip()

    def _wish(self, task: Task, slot: str) -> str:
        value = task.data["wishes"].get(slot)
        if value is None:
            return f"{slot}: any" if self.wording == "short" else f"As to the {slot}: any is fine."
        return f"{slot}: {value}" if self.wording == "short" else f"As to the {slot}: {value}."

    def answer(self, task: Task, said: str) -> str:
        """Return what a scripted user answers: the wishes asked about, what is wrong with a booking, or goodbye."""
        booked, short = booking(said), self.wording == "short"
        wishes = task.data["wishes"]
        if booked is not None:
            wrong = [slot for slot, value in wishes.items() if booked.get(slot) != value.casefold()]
            if not wrong:
                return "bye" if short else "Thank you, that is what I wanted. GOODBYE"
            return f"no {wrong[0]}" if short else f"No, something is wrong with the {wrong[0]}."
        asked = self._asked(task, said)
        if not asked:
            return "?" if short else "What would you like to know?"
        answered = asked[:1] if task.data["persona"] == "terse" else asked
        return (" " if not short else ",").join(self._wish(task, slot) for slot in answered)

    def _asked(self, task: Task, said: str) -> list[str]:
        """Return the things that a text asks about, by their names or values, in the order of the text."""
        words = re.findall(r"[a-z0-9:]+", said[:READ].casefold())
        slots = self._slots(str(task.data["errand"]))
        place = {word.strip(":"): k for k, word in reversed(list(enumerate(words)))}
        first = {
            slot: min(place[word] for word in (slot, *map(str.casefold, values)) if word in place)
            for slot, values in slots.items()
            if any(word in place for word in (slot, *map(str.casefold, values)))
        }
        return sorted(first, key=lambda slot: first[slot])

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the user's answer, or the assistant's: it asks about one thing after another and books what it was told."""
        short = self.wording == "short"
        heard = [message.content for message in messages if message.role == "user"]
        if agent == self.user:
            last = heard[-1] if heard else ""
            said = re.split(r"^Assistant[^:\n]*: ", last, flags=re.MULTILINE)[-1]
            if RATE in last:
                return "10"
            return self.opening(task) if self.users_head(task) in said else self.answer(task, said)
        slots = self._slots(str(task.data["errand"]))
        told = dict(re.findall(rf"\b({'|'.join(slots)}): ([\w:]*\w)", "\n".join(heard)))
        open_ones = [slot for slot in slots if slot not in told]
        if flawed(self.flaws, agent, seed):
            told |= {slot: random.Random(f"{seed}/{slot}").choice(slots[slot]) for slot in open_ones}
            open_ones = []
        if open_ones:
            return f"{open_ones[0]}?" if short else f"What about the {open_ones[0]}?"
        known = [f"{slot}={told[slot]}" for slot in slots if told[slot] != "any"]
        return f"BOOK {('; ', ' ')[short].join(known)}"


_BOOK = re.compile(r"^[ \t*>-]*BOOK\b[: \t]*(?P<pairs>[^\n]*)", re.IGNORECASE | re.MULTILINE)
_PAIR = re.compile(r"(\w+) ?= ?([\w:]*\w)")
RATE = "How satisfied are you, from 0 to 10?"
"""What the user's agent is asked at the end, where it is asked for its satisfaction."""
_NUMBER = re.compile(r"(?<![\d.,-])(10|\d)(?![\d]|[.,]\d)")


def booking(said: str) -> dict[str, str] | None:
    """Return the booking of a text, the last line that begins with BOOK, by slot and in lower case; None without one."""
    lines = list(_BOOK.finditer(said[:READ]))
    if not lines:
        return None
    return {slot.casefold(): value.casefold() for slot, value in _PAIR.findall(lines[-1]["pairs"])}


def rating(said: str) -> float | None:
    """Return the satisfaction in [0, 1] that a text names, its first number from 0 to 10; None without one."""
    found = _NUMBER.search(said[:READ])
    return None if found is None else int(found[1]) / 10


class ConversationWorld(BaseWorld):
    """One conversation."""

    def __init__(self, settings: UserConversation, task: Task, agents: Sequence[str]) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._assistants = tuple(agent for agent in self.agents if agent != settings.user)
        self._spoken: list[tuple[str, str]] = []
        """Who said what; the scripted user is called `script`."""
        self._heard = dict.fromkeys(self.agents, 0)
        """How much of that an agent has read when it spoke last."""
        self._answers = 0
        self._wrong = 0
        self._met = 0.0
        self._booked: Json = None
        self._ended: Literal["user", "limit"] | None = None
        self._asked_to_rate = False
        self._rating: float | None = None
        if settings.user == SCRIPT:
            self._spoken.append((SCRIPT, settings.opening(task)))

    def _label(self, who: str) -> str:
        if who in (self._settings.user, SCRIPT):
            return "User"
        return "Assistant" if len(self._assistants) == 1 else f"Assistant {who}"

    def observe(self, agent: str) -> str:
        """Return what was said, after what the agent has to know; the wishes only to the user."""
        settings, latest = self._settings, self._settings.view == "latest"
        heard = self._heard[agent] if latest else 0
        lines = [
            # Between two, who speaks is clear.
            said if latest and len(self._assistants) == 1 else f"{self._label(who)}: {said}"
            for who, said in self._spoken[heard:]
            if not latest or who != agent
        ]
        is_user = agent == settings.user
        if heard == 0:
            head = settings.users_head(self.task) if is_user else settings.assistants_head(self.task)
            lines.insert(0, head)
        if is_user and self._asked_to_rate:
            lines.append(f"{RATE} Answer with the number.")
        return "\n".join(lines)

    def movers(self) -> tuple[str, ...]:
        """Return the user's agent, or the assistant whose turn it is."""
        if self.over:
            return ()
        user = self._settings.user
        if user != SCRIPT and (self._asked_to_rate or not self._spoken or self._spoken[-1][0] != user):
            return (user,)
        return (self._assistants[self._answers % len(self._assistants)],)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take what one of them says; EpisodeError for anybody out of turn."""
        movers = self.movers()
        need_movers(actions, movers)
        [(agent, said)] = actions.items()
        if self._asked_to_rate:
            self._rating = rating(said)
            self._end()
            return {}
        self._spoken.append((agent, said))
        self._heard[agent] = len(self._spoken)
        if agent == self._settings.user:
            # It has the last word, also after the last answer that an assistant may give.
            if re.search(r"\b(goodbye|bye)\b", said[:READ], re.IGNORECASE):
                self._leave("user")
            elif self._answers >= self._settings.max_turns:
                self._leave("limit")
            return {}
        self._answers += 1
        booked = booking(said)
        wishes = self.task.data["wishes"]
        if booked is not None:
            self._booked = dict(booked)
            self._met = sum(booked.get(slot) == value.casefold() for slot, value in wishes.items()) / len(
                wishes
            )
        if self._settings.user == SCRIPT:
            self._spoken.append((SCRIPT, self._settings.answer(self.task, said)))
            self._wrong += booked is not None and self._met < 1.0
            if (booked is not None and self._met == 1.0) or self._wrong > self._settings.patience:
                self._leave("user")
            elif self._answers >= self._settings.max_turns:
                self._leave("limit")
        return {}

    def _leave(self, why: Literal["user", "limit"]) -> None:
        """End the conversation, after the user's word on it where that is asked for."""
        self._ended = why
        if self._settings.satisfaction == "user":
            self._asked_to_rate = True
        else:
            self._end()

    def _end(self) -> None:
        self.over = True
        content = self._met if self._settings.satisfaction == "goals" else self._rating or 0.0
        satisfied = max(0.0, content - self._settings.turn_cost * self._answers)
        self.rewards = dict.fromkeys(self.agents, satisfied)
        self.success = self._met

    def outcome(self) -> Outcome:
        """Return the satisfaction; a conversation that was cut off is truncated and pays nothing."""
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
