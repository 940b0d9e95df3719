"""Single-turn questions of the Berkeley Function Calling Leaderboard (BFCL).

An agent reads a question and the schemas of tools, and writes tool calls. The calls are not executed, but compared with the
accepted calls that BFCL lists, by the rules in `grading.text.tool_call`. In the category `irrelevance`, no tool can help to answer
the question, so a correct answer contains no tool call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from kapelle.environment import Reads
from kapelle.environments.grading.text.tool_call import (
    Form,
    NotCalls,
    ReadCall,
    grade_tool_call,
    may_be_left_out,
    parse_calls,
    required_arguments,
    write_calls,
)
from kapelle.environments.questions import Answers, Questions, place_of
from kapelle.environments.tools.contract import tools_prompt
from kapelle.errors import DataError
from kapelle.runtime.row_files import SUFFIXES, held_out, read_rows
from kapelle.types import Json, Message, Split, Task

Category = Literal[
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "irrelevance",
]
NO_CALL_IS_RIGHT: frozenset[Category] = frozenset({"irrelevance"})
"""Categories in which a correct answer contains no tool call. BFCL publishes no file of accepted answers for them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its tools and its accepted calls."""

    id: str
    question: str
    tools: tuple[Json, ...]
    accepted: tuple[Mapping[str, Mapping[str, Json]], ...]


class Bfcl(Questions, Reads):
    """Questions whose answers are tool calls. The calls are compared with the accepted calls of BFCL."""

    name: Literal["bfcl"] = "bfcl"
    path: str = "bfcl"
    """The folder with the data, which contains a file for each category (such as `simple_python.jsonl`) and a folder
    `possible_answer/` with files of the same names."""
    categories: tuple[Category, ...] = Field(default=("simple_python", "multiple", "parallel"), min_length=1)
    """The categories of BFCL from which questions are read."""
    form: Form = "hermes"
    """The format in which the agents' model writes tool calls, which is `hermes` (Hermes, Qwen), `llama` (JSON) or `pythonic`."""
    test_share: float = Field(default=0.1, gt=0.0, lt=1.0)
    """The fraction of the questions in the test split. A hash of a question's id determines its split."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer consists of tool calls."""
        return Answers(
            lambda text, task: grade_tool_call(text, task.data["accepted"], (self.form,), self._tools(task)),
            self._normal_form,
        )

    def _tools(self, task: Task) -> Sequence[Json]:
        split, index = place_of(task.id)
        return self._items(split)[index].tools

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the folder with the data and of the fraction of questions in each split."""
        names = ", ".join(self.categories)
        return {
            "train": f"{self.path} ({names}), {1 - self.test_share:.0%} of the questions, by a hash of the id",
            "test": f"{self.path} ({names}), {self.test_share:.0%} of the questions, by a hash of the id",
        }

    def _items(self, split: Split) -> tuple[Item, ...]:
        return tuple(
            item
            for category in self.categories
            for item in _read(self.path, category, self.test_share).items[split]
        )

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each input file."""
        return {
            name: content
            for category in self.categories
            for name, content in _read(self.path, category, self.test_share).contents.items()
        }

    def check(self, agents: Sequence[str]) -> None:
        """Read the files of all categories. Raises DataError if a file is missing, empty or malformed."""
        for split in ("train", "test"):
            if not self._items(split):
                raise DataError(
                    f"No question of '{self.path}' is in the {split} split. Change `environment.test_share`, "
                    "or add categories to `environment.categories`."
                )

    def size(self, split: Split) -> int | None:
        """Return the number of questions in a split."""
        return len(self._items(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index, preceded by a description of its tools."""
        item = self._items(split)[index]
        question = f"{tools_prompt(item.tools, self.form)}\n\n{item.question}"
        return Task(f"{split}-{index}", question, {"id": item.id, "accepted": list(item.accepted)})

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the id of the question in BFCL."""
        return {"id": task.data["id"]}

    def _normal_form(self, text: str) -> str | None:
        try:
            calls = parse_calls(text, (self.form,))
        except NotCalls:
            return None
        return "\n".join(sorted(write_calls([call], "pythonic") for call in calls)) or None

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the first accepted calls, or a sentence without a call if the correct answer contains no call."""
        calls = gold_calls(task.data["accepted"], self._tools(task))
        return write_calls(calls, self.form) if calls else "None of these tools can help."


def gold_calls(
    accepted: Sequence[Mapping[str, Mapping[str, Json]]], tools: Sequence[Json] = ()
) -> list[ReadCall]:
    """Return the shortest accepted calls. Each call contains the first accepted value of every required argument."""
    return [
        ReadCall(
            name,
            {
                key: _first(values)
                for key, values in options.items()
                if not may_be_left_out(values, key in required_arguments(tools, name))
            },
        )
        for call in accepted
        for name, options in call.items()
    ]


def _first(options: Json) -> Json:
    return _plain(
        next((each for each in options if each != ""), "") if isinstance(options, list) else options
    )


def _plain(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _first(options) for key, options in value.items() if not may_be_left_out(options)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class _Read:
    """The questions of one category in each split, and the hashes of the files that were read."""

    items: Mapping[Split, tuple[Item, ...]]
    contents: Mapping[str, str]


@lru_cache(maxsize=32)
def _read(path: str, category: Category, test_share: float) -> _Read:
    folder = Path(path).expanduser()
    accepted: dict[str, Json] = {}
    contents: dict[str, str] = {}
    if category not in NO_CALL_IS_RIGHT:
        answers = read_rows(_file(folder / "possible_answer", category), contents)
        for row in answers:
            calls = row.fields.get("ground_truth")
            if not isinstance(calls, list) or not all(
                isinstance(call, dict) and len(call) == 1 and isinstance(next(iter(call.values())), dict)
                for call in calls
            ):
                raise row.unusable(
                    "`ground_truth` must be a list of mappings from one tool to its accepted arguments"
                )
            accepted[row.text("id", "path")] = tuple(calls)
    items = []
    for row in read_rows(_file(folder, category), contents):
        number = row.text("id", "path")
        if category not in NO_CALL_IS_RIGHT and number not in accepted:
            raise DataError(
                f"{row.place}: the question '{number}' has no accepted answer in the folder `possible_answer`."
            )
        try:
            messages = [message for turn in row.fields["question"] for message in turn]
            question = "\n\n".join(str(message["content"]) for message in messages)
            tools = tuple(row.fields["function"])
        except (KeyError, TypeError) as fault:
            raise DataError(f"{row.place} is not a row of BFCL: {fault!r} is missing or invalid.") from None
        items.append(Item(number, question, tools, accepted.get(number, ())))
    by_split: dict[Split, tuple[Item, ...]] = {
        "train": tuple(item for item in items if not held_out(item.id, test_share)),
        "test": tuple(item for item in items if held_out(item.id, test_share)),
    }
    return _Read(by_split, contents)


def _file(folder: Path, category: Category) -> Path:
    candidates = [folder / f"{category}{suffix}" for suffix in SUFFIXES]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise DataError(
        f"There is no file '{folder / category}.jsonl' (or {', '.join(SUFFIXES[:1] + SUFFIXES[2:])}). Set `environment.path` "
        "to a folder in which BFCL's files are named after their categories, or change `environment.categories`."
    )
