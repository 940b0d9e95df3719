"""What both contenders work on: tiny Qwen3 models, a tokeniser, prompts of a fixed length.

The end-of-turn token lies one past the model's vocabulary: no one can sample it, so every completion
has exactly the length that was asked for, on both sides and without a patch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kapelle.environment import Answerable, EpisodeState, Outcome
from kapelle.models.embedded import build_model, build_tokenizer
from kapelle.models.language_model import LanguageModel
from kapelle.settings.base import Settings
from kapelle.settings.schema import EmbeddedConfig
from kapelle.types import Split, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONTEXT = 1024
MODELS: Mapping[str, EmbeddedConfig] = {
    "1M": EmbeddedConfig(context=CONTEXT),
    "10M": EmbeddedConfig(hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1152, context=CONTEXT),
}
NEVER = "<|never|>"
TEMPLATE_TOKENS = 3
"""`<|user|>`, `<|end|>` and `<|assistant|>` around a question in a prompt."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return kapelle's byte tokeniser with an end token that no model here can sample."""
    made = build_tokenizer(CONTEXT)
    made.add_special_tokens({"eos_token": NEVER})
    return made


def model(size: str) -> PreTrainedModel:
    """Return the model of a size; the same weights at every call."""
    words = tokenizer()
    reachable = len(words) - 1
    assert words.eos_token_id == reachable, "the end token is the first id that the model cannot say"
    return build_model(MODELS[size], reachable, reachable, int(words.pad_token_id))


def subject(size: str, dtype: str = "float32") -> LanguageModel:
    """Return the same model as kapelle holds it."""
    return LanguageModel(model(size), tokenizer(), dtype, size)


def question(seed: int, prompt_tokens: int) -> str:
    """Return a random question whose prompt has that many tokens."""
    letters = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=prompt_tokens - TEMPLATE_TOKENS)
    return "".join(letters)


def reward(text: str) -> float:
    """Return 1 for about half of all texts: cheap, and groups have variance."""
    return float(sum(text.encode()) % 2)


class DrawnTasks(Settings):
    """What environments of benchmarks have in common: tasks without end, from a seed each, and rewards that depend on the answer alone."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """See `reward`."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Both are drawn."""
        return {"train": "drawn from even seeds", "test": "drawn from odd seeds"}

    def check(self, agents: Sequence[str]) -> None:
        """Reject nothing."""

    def size(self, split: Split) -> int | None:
        """There is no end of them."""
        return None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EpisodeState:
        """Open its world."""
        return FixedState(task, agents)


def seed_of(split: Split, index: int) -> int:
    """Return the seed of a task."""
    return 2 * index + (split == "test")


class FixedTasks(DrawnTasks, Answerable):
    """Questions of a fixed number of tokens."""

    name: Literal["benchmarks.subjects:FixedTasks"] = "benchmarks.subjects:FixedTasks"
    prompt_tokens: int = 64

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        return Task(f"{split}-{index}", question(seed_of(split, index), self.prompt_tokens))

    def extract(self, text: str) -> str | None:
        """Every text is its own answer."""
        return text


class FixedState:
    """One question; all answer in each of the `rounds` of its data, or once, and each agent is paid for its own last text."""

    def __init__(self, task: Task, agents: Sequence[str]) -> None:
        self._task, self._agents, self._played = task, tuple(agents), 0
        self._rounds = int(task.data.get("rounds", 1))
        self._rewards: dict[str, float] = {}

    def observe(self, agent: str) -> str:
        """Return the question, and the round where there are several."""
        return self._task.question if self._rounds == 1 else f"{self._task.question} {self._played}"

    def movers(self) -> tuple[str, ...]:
        """Return everyone, until the rounds are over."""
        return self._agents if self._played < self._rounds else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Count a round; pay at the end."""
        self._played += 1
        self._rewards = {name: reward(text) for name, text in actions.items()}
        return {}

    def outcome(self) -> Outcome:
        """Return what was earned."""
        return Outcome(self._rewards, None)

    async def close(self) -> None:
        """Hold nothing."""


def same(source: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with the same weights, for the other contender."""
    twin: PreTrainedModel = copy.deepcopy(source)
    return twin


def prompt_ids(seed: int, tokens: int) -> tuple[int, ...]:
    """Return random tokens of ordinary text."""
    draw = random.Random(seed)
    return tuple(draw.randrange(40, 100) for _ in range(tokens))
