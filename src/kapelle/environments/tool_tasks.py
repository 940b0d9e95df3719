"""Generated tasks for tools: expressions, programs, facts to look up, notes to write, and changes to a calendar.

Tasks are generated from a seed. The documents, notes and events of a task are available only through the tools. The graded result
of a task is a number, or the final state of the notes or the calendar, which must contain no other change.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import Answerable, Outcome, Reporting, Scripted
from kapelle.environments.base import BaseState
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.grading.text.tool_call import ReadCall, write_calls
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import (
    Answers,
    Difficulty,
    Flaws,
    Graded,
    Problem,
    check_flaws,
    describe,
    draw_task,
    flawed,
    numbers,
    require_agents,
    up_to,
)
from kapelle.environments.tool_questions import CallSettings, ToolsState
from kapelle.environments.tools.calculator import Calculator, calculate
from kapelle.environments.tools.calendar import Calendar, Events
from kapelle.environments.tools.contract import Toolbox, ToolSchema
from kapelle.environments.tools.files import Files, Folder
from kapelle.environments.tools.python import Python
from kapelle.environments.tools.search import CorpusIndex, Passage, search_toolbox
from kapelle.errors import EpisodeError
from kapelle.types import Json, Message, Split, Task

ToolKind = Literal["calculator", "python", "search", "notes", "calendar"]
KINDS: tuple[ToolKind, ...] = ("calculator", "python", "search", "notes", "calendar")
FOUND = 3
"""The number of passages that a search returns."""


class ToolTasks(CallSettings, Graded, Answerable, Scripted, Reporting):
    """Tasks for a calculator, Python, search, notes and a calendar. Every agent has its own tools."""

    name: Literal["tool_tasks"] = "tool_tasks"
    kinds: tuple[ToolKind, ...] = Field(default=KINDS, min_length=1)
    """The kinds of tasks. The kind of each task is sampled uniformly. Agents have the tools for all kinds."""
    difficulty: Annotated[Difficulty, up_to(3)] = (1, 3)
    """The minimum and maximum difficulty, from 1 to 3."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a task does not
    depend on the seed."""
    python: Python = Python()
    """Settings of the Python interpreter and its sandbox, as in the environment `tools`."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "last_number"), min_length=1)
    """Rules that extract a number from an agent's answer."""
    flaws: Flaws = Field(default_factory=dict)
    """Mapping from an agent to the fraction of its demonstrations that contain no tool call."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one number. Tasks with notes or events have no answer."""
        return numbers(self.extraction)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the generated tasks of each split. A hash of the text of a task determines its split."""
        return describe(f"tasks for tools ({', '.join(self.kinds)})", self.difficulty)

    def size(self, split: Split) -> int | None:
        """Return None, because the number of tasks is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, which is the same in every process."""
        return draw_task(self.name, self.seed, split, index, self.difficulty, self.problem)

    def extract(self, text: str) -> str | None:
        """Return the number in an answer, or None if the answer contains no number."""
        return self.answers.normal_form(text)

    def check(self, agents: Sequence[str]) -> None:
        """Raise SandboxError if the sandbox for Python is needed but unavailable, and ConfigError if `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)
        if "python" in self.kinds:
            self.python.check()

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of descriptors that the Python interpreters of one episode hold open."""
        return agents * Python.descriptors if "python" in self.kinds else 0

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a random task of a random kind."""
        kind = draw.choice(self.kinds)
        question, data = MAKERS[kind](draw, level)
        return Problem(question, {"kind": kind, **data}, question)

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the kind and the difficulty of the task."""
        return {"kind": task.data["kind"], "difficulty": task.data["difficulty"]}

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ToolsState:
        """Start an episode and return its state. Each agent has its own tools."""
        boxes = {agent: self._open(task) for agent in agents}
        first = next(iter(boxes.values()))
        schemas: list[ToolSchema] = [tool.schema for box in first.values() for tool in box.tools]
        state = ToolTaskState(self, task, boxes)
        return ToolsState(state, {agent: list(own.values()) for agent, own in boxes.items()}, schemas, self)

    def _open(self, task: Task) -> dict[ToolKind, Toolbox]:
        """Return the tools of one agent, filled with the documents, notes and events of the task."""
        data = task.data
        opened: dict[ToolKind, Toolbox] = {}
        for kind in self.kinds:
            if kind == "calculator":
                opened[kind] = Calculator().open()
            elif kind == "python":
                opened[kind] = self.python.open()
            elif kind == "search":
                texts = tuple((title, text) for title, text in data.get("documents", ()))
                opened[kind] = search_toolbox(partial(_search, texts), FOUND)
            elif kind == "notes":
                opened[kind] = Files(write=True, texts=data.get("notes", {})).open()
            else:
                held = [
                    {"title": title, "start": start, "minutes": minutes}
                    for title, start, minutes in data.get("events", ())
                ]
                opened[kind] = Calendar.model_validate({"now": data.get("now", NOW), "events": held}).open()
        return opened

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the tool calls of the next step or, after the last step, the answer.

        A flawed demonstration guesses the answer without tool calls.
        """
        data, last = task.data, messages[-1].content if messages else ""
        if flawed(self.flaws, agent, seed):
            guess = self.answers.written(str(random.Random(seed).randint(0, 99)))
            return guess if "answer" in data else "Done."
        # The message shows the result of the last finished step; the prompt ends with the question and has no result.
        taken = 0
        if messages and not last.endswith(task.question):
            taken = max(
                (k for k, step in enumerate(data["steps"], 1) if step["shows"] in last),
                default=len(data["steps"]),
            )
        if taken < len(data["steps"]):
            calls = data["steps"][taken]["calls"]
            return write_calls([ReadCall(call["name"], call["arguments"]) for call in calls], self.form)
        return self.answers.written(data["answer"]) if "answer" in data else "Done."


@lru_cache(maxsize=64)
def _index(texts: tuple[tuple[str, str], ...]) -> CorpusIndex:
    """Return the search index of a task's documents. The episodes of a group share this index."""
    return CorpusIndex([Passage(title, text) for title, text in texts])


def _search(texts: tuple[tuple[str, str], ...], query: str, count: int) -> Sequence[Passage]:
    return _index(texts).search(query, count)


class ToolTaskState(BaseState):
    """The state of an episode of one task. The first answers end the episode, and the state of each agent's tools is graded."""

    def __init__(
        self, settings: ToolTasks, task: Task, boxes: Mapping[str, Mapping[ToolKind, Toolbox]]
    ) -> None:
        super().__init__(task, tuple(boxes))
        self._settings, self._boxes = settings, boxes
        self._why: dict[str, Json] = {}

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the numbers in the agents' texts or the state of their tools. A number in `final` is the answer of the team."""
        if self.over:
            raise EpisodeError("The task has already been answered. An episode allows one step.")
        require_agents(actions, self.agents, "answered")
        grades = {agent: self._grade(agent, text) for agent, text in actions.items()}
        self.rewards = {agent: grade.score for agent, grade in grades.items()}
        self.success = sum(self.rewards.values()) / len(self.rewards)
        if final is not None and "answer" in self.task.data:
            self.success = self._number(final).score
        self._why = {agent: grade.explanation for agent, grade in grades.items()}
        self.over = True
        return {}

    def _number(self, text: str) -> Grade:
        grade = self._settings.answers.grade(text, self.task)
        assert isinstance(grade, Grade), "numbers are graded at once"
        return grade

    def _grade(self, agent: str, text: str) -> Grade:
        data, boxes = self.task.data, self._boxes[agent]
        if "answer" in data:
            return self._number(text)
        left: Json
        wanted: Json
        if data["kind"] == "notes":
            folder = boxes["notes"]
            assert isinstance(folder, Folder), "opened above"
            left, wanted = _lines(folder.state()), _lines(data["notes_after"])
        else:
            events = boxes["calendar"]
            assert isinstance(events, Events), "opened above"
            left, wanted = events.state(), data["events_after"]
        if left == wanted:
            return Grade(1.0, None, f"The {data['kind']} is as requested.")
        return Grade(0.0, None, f"The {data['kind']} contains {left!r:.200} in place of {wanted!r:.200}.")

    def outcome(self) -> Outcome:
        """Return the outcome with the scores as rewards. An episode without an answer is truncated and has success 0."""
        info = {**self._settings.about(self.task), "explanations": self._why}
        return Outcome(self.rewards, self.success if self.over else 0.0, info, truncated=not self.over)


def _lines(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of each text without surrounding whitespace, so that a line break at the end has no effect on the comparison."""
    return {path: [line.strip() for line in text.strip().splitlines()] for path, text in texts.items()}


# -------- Tasks: each function returns a question and its data
#
# `answer` is the correct number; if there is none, `notes_after` or `events_after` is the correct final state. `steps` are the calls
# of an expert, each with a part of its results by which the script recognises that the step is done.

Made = tuple[str, dict[str, Json]]
NOW = "2031-03-03 09:00"
_WORDS: Mapping[str, Sequence[str]] = tomllib.loads(
    (files("kapelle.environments") / "tool_tasks.toml").read_text("utf-8")
)


def _call(name: str, **arguments: Json) -> dict[str, Json]:
    return {"name": name, "arguments": arguments}


def _step(shows: str, *calls: dict[str, Json]) -> dict[str, Json]:
    return {"shows": shows, "calls": list(calls)}


def calculator_task(draw: random.Random, level: int) -> Made:
    """Return a task with an expression, which has one operation, three operations, or a percentage or quotient, depending on the level."""
    if level == 1:
        left, right = sorted((draw.randint(12, 99), draw.randint(12, 99)))
        text = expression = f"{left}*{right}"
    elif level == 2:
        a, b, c, d = (draw.randint(100, 999) for _ in range(4))
        text = expression = f"({a}+{b})*{c}-{d}"
    elif draw.random() < 0.5:
        share, a, b = draw.randint(2, 98), draw.randint(100, 999), draw.randint(100, 999)
        text, expression = f"{share}% of the sum of {a} and {b}", f"{share}%*({a}+{b})"
    else:
        a, b, c, d = (*(draw.randint(100, 999) for _ in range(3)), draw.choice((2, 4, 5, 8)))
        text = expression = f"({a}*{b}-{c})/{d}"
    answer = calculate({"expression": expression})
    step = _step(answer, _call("calculator", expression=expression))
    return f"What is {text}?", {"answer": answer, "steps": [step]}


def python_task(draw: random.Random, level: int) -> Made:
    """Return a task that needs a loop: a sum of multiples, a count of prime numbers, or the length of a sequence."""
    low = draw.randint(10, 400)
    high = low + draw.randint(100, 400)
    if level == 1:
        divisor = draw.randint(3, 19)
        question = f"What is the sum of all whole numbers from {low} to {high} that {divisor} divides?"
        program = f"print(sum(n for n in range({low}, {high + 1}) if n % {divisor} == 0))"
        answer = sum(range(-(-low // divisor) * divisor, high + 1, divisor))
    elif level == 2:
        question = f"How many prime numbers are there from {low} to {high}?"
        program = (
            f"print(sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({low}, {high + 1})))"
        )
        sieve = [False, False] + [True] * (high - 1)
        for n in range(2, high + 1):
            if sieve[n]:
                sieve[2 * n :: n] = [False] * len(sieve[2 * n :: n])
        answer = sum(sieve[low:])
    else:
        begin = draw.randint(1_000, 99_999)
        question = (
            f"Begin with {begin}. An even number is halved, an odd one is multiplied by 3 and 1 is added. "
            "After how many steps is it 1?"
        )
        program = f"n, steps = {begin}, 0\nwhile n != 1:\n    n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1\nprint(steps)"
        answer, n = 0, begin
        while n != 1:
            n, answer = (3 * n + 1 if n & 1 else n >> 1), answer + 1
    return question, {"answer": str(answer), "steps": [_step(str(answer), _call("python", program=program))]}


RIVERS = 5
"""The number of rivers, and also the number of towns, in the documents of one task."""


def search_task(draw: random.Random, level: int) -> Made:
    """Return a question about invented rivers and towns, which asks for one fact, the difference of two facts, or a chain of two facts."""
    names: dict[str, None] = {}
    while len(names) < 2 * RIVERS:
        names[
            draw.choice(_WORDS["beginnings"])
            + draw.choice(_WORDS["middles"])
            + draw.choice(_WORDS["endings"])
        ] = None
    rivers, towns = list(names)[:RIVERS], list(names)[RIVERS:]
    long = draw.sample(range(40, 900), RIVERS)
    people = [draw.randint(1_000, 90_000) for _ in towns]
    documents = [
        [river, f"The river {river} is {long[k]} km long and flows through the town of {towns[k]}."]
        for k, river in enumerate(rivers)
    ] + [[town, f"The town of {town} has {people[k]} inhabitants."] for k, town in enumerate(towns)]
    draw.shuffle(documents)

    def find(kind: str, name: str, shows: object) -> dict[str, Json]:
        return _step(f" {shows} ", _call("search", query=f"{kind} {name}"))

    if level == 1:
        question, answer = f"How long is the river {rivers[0]}, in km?", long[0]
        steps = [find("river", rivers[0], long[0])]
    elif level == 2:
        longer, shorter = sorted((0, 1), key=lambda k: -long[k])
        question = f"How many km longer is the river {rivers[longer]} than the river {rivers[shorter]}?"
        answer = long[longer] - long[shorter]
        calls = [_call("search", query=f"river {rivers[k]}") for k in (longer, shorter)]
        steps = [_step(f" {long[shorter]} ", *calls)]
    else:
        question = f"How many inhabitants has the town that the river {rivers[0]} flows through?"
        answer = people[0]
        steps = [find("river", rivers[0], long[0]), find("town", towns[0], people[0])]
    return question, {"answer": str(answer), "documents": documents, "steps": steps}


def notes_task(draw: random.Random, level: int) -> Made:
    """Return a task to write a note: a given text, a part of another note, or a sum over several notes."""
    if level == 1:
        person, gift, price = (
            draw.choice(_WORDS["people"]),
            draw.choice(_WORDS["gifts"]),
            draw.randint(5, 250),
        )
        text, file = f"a {gift} for {person}, {price} euros", f"{gift}.txt"
        notes = {"ideas.txt": "call home\n"}
        question = f"Write a note into the file {file}: {text}"
        steps = [_step("Wrote", _call("write_file", path=file, text=text))]
    elif level == 2:
        person, doors = draw.choice(_WORDS["people"]), draw.sample(_WORDS["doors"], 3)
        codes = [draw.randint(1_000, 9_999) for _ in doors]
        listed = "".join(f"{door} door: {code}\n" for door, code in zip(doors, codes, strict=True))
        notes, file, text = {"codes.txt": listed}, f"{doors[0]}.txt", str(codes[0])
        question = (
            f"The file codes.txt holds the codes of {person}'s house. Write the code of the {doors[0]} door, and nothing "
            f"else, into the file {file}."
        )
        steps = [
            _step(f"{doors[0]} door: ", _call("read_file", path="codes.txt")),
            _step("Wrote", _call("write_file", path=file, text=text)),
        ]
    else:
        person, month = draw.choice(_WORDS["people"]), draw.choice(_WORDS["months"])
        shops = sorted(draw.sample(_WORDS["bills"], draw.randint(2, 4)))
        owed = [draw.randint(10, 500) for _ in shops]
        notes = {
            f"{month}/{shop}.txt": f"{person} owes the {shop} {each} euros.\n"
            for shop, each in zip(shops, owed, strict=True)
        }
        file, text = "total.txt", str(sum(owed))
        question = (
            f"Each file in the folder {month} is a bill of {person}. Write the sum of all, the number alone, into the file "
            f"{file}."
        )
        steps = [
            _step(f"{shops[0]}.txt", _call("list_files", folder=month)),
            _step(f"{person} owes", *(_call("read_file", path=path) for path in notes)),
            _step("Wrote", _call("write_file", path=file, text=text)),
        ]
    data = {"notes": notes, "notes_after": {**notes, file: text}, "steps": steps}
    return f"{question}\nThen say that it is done.", data


_FORM = "%Y-%m-%d %H:%M"


def calendar_task(draw: random.Random, level: int) -> Made:
    """Return a task to change a calendar: to create, move or cancel an event, or to create an event at the first free time."""
    now = datetime(2031, 1, 6, 9) + timedelta(days=draw.randint(0, 700))  # noqa: DTZ001 (local time)
    day = (now + timedelta(days=1)).replace(hour=0)
    titles = draw.sample(_WORDS["events"], 4)
    # There are two events tomorrow between 9 and 13, and one on the day after; the afternoons are free.
    starts = [
        day + timedelta(hours=9 + draw.choice((0, 1))),
        day + timedelta(hours=11, minutes=draw.choice((0, 30))),
    ]
    starts.append(day + timedelta(days=1, hours=draw.randint(9, 15)))
    events = [[title, start.strftime(_FORM), 60] for title, start in zip(titles[:3], starts, strict=True)]
    new, listed = titles[3], _step("It is ", _call("list_events", day=f"{day:%Y-%m-%d}"))
    if level == 1:
        start, minutes = day + timedelta(hours=draw.randint(14, 19)), draw.choice((15, 30, 45, 60))
        after = [*events, [new, start.strftime(_FORM), minutes]]
        question = f"Put '{new}' into the calendar: {start.strftime(_FORM)}, {minutes} minutes."
        steps = [
            _step("Created", _call("create_event", title=new, start=start.strftime(_FORM), minutes=minutes))
        ]
    elif level == 2 and draw.random() < 0.5:
        start = day + timedelta(hours=draw.randint(14, 19))
        after = [[events[0][0], start.strftime(_FORM), 60], *events[1:]]
        question = f"It is {now:%A}, {now:%Y-%m-%d}. Move '{titles[0]}' of tomorrow to {start:%H:%M} on the same day."
        steps = [listed, _step("Moved", _call("move_event", number=1, start=start.strftime(_FORM)))]
    elif level == 2:
        after = events[1:]
        question = f"It is {now:%A}, {now:%Y-%m-%d}. Cancel '{titles[0]}' of tomorrow."
        steps = [listed, _step("Deleted", _call("delete_event", number=1))]
    else:
        minutes = draw.choice((30, 60, 90, 120))
        start = day + timedelta(hours=9)
        for begins in starts[:2]:
            if start + timedelta(minutes=minutes) > begins:
                start = begins + timedelta(hours=1)
        after = [*events, [new, start.strftime(_FORM), minutes]]
        question = (
            f"It is {now:%A}, {now:%Y-%m-%d}. Put '{new}' into the calendar tomorrow, for {minutes} minutes, at the "
            "earliest time from 09:00 on that is free."
        )
        steps = [
            listed,
            _step("Created", _call("create_event", title=new, start=start.strftime(_FORM), minutes=minutes)),
        ]
    data = {
        "now": now.strftime(_FORM),
        "events": events,
        "events_after": sorted(after, key=lambda event: (event[1], event[0])),
        "steps": steps,
    }
    return f"{question}\nThen say that it is done.", data


MAKERS: Mapping[ToolKind, Callable[[random.Random, int], Made]] = {
    "calculator": calculator_task,
    "python": python_task,
    "search": search_task,
    "notes": notes_task,
    "calendar": calendar_task,
}
