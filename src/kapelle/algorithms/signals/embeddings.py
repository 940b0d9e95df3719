"""Turns as vectors: embeddings, by a frozen model, of what an agent read and of what it wrote.

- `base`, all trained agents on one model: the exact tokens that they read and wrote, by that model as it was at the start.
- `base` with several models: the text of all agents, by the model of the first trained agent in seat order, so that all
  vectors lie in one space.
- a model's path or hub name: the text, by that model, which is loaded beside the team and plays no agent.
- `sentence-transformers:NAME`: the text, by a model of that library (`pip install 'kapelle[embed]'`).

As text, an agent has read its whole conversation so far, messages joined by empty lines; a model reads it as one user
message, cut to the last tokens that fit its context.

Shapes: D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError
from kapelle.models.paths import check_hub_name, local_only
from kapelle.rows import Beside, Embedding, Learners, Loads, Sample, Sampled, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.team import EMBEDDER, Policy, Team, embedder_name
from kapelle.types import Episode, Group, Message

SENTENCES = "sentence-transformers:"
"""Prefix of the name of a model of that library."""


@dataclass(frozen=True, slots=True)
class Embeddings(Beside, Loads):
    """Gives `Signals.embedding`."""

    reader: str = "base"
    """`base`, a model's path, or `sentence-transformers:NAME`."""
    device: str | None = None
    """Where a model other than `base` is held; None leaves it to `model.device`, or to that library."""

    def load(self) -> None:
        """Load a model of sentence-transformers; ModelError names the reason if it cannot be loaded."""
        if self.reader.startswith(SENTENCES):
            load_sentences(self.reader.removeprefix(SENTENCES), self.device)

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Embedding]]:
        """Return every trained turn as vectors; ModelError if the model cannot be loaded."""
        if self.reader.startswith(SENTENCES):
            encode = load_sentences(self.reader.removeprefix(SENTENCES), self.device)
            return {"embedding": by_sentences(step.groups, encode)}
        return {"embedding": embedded_turns(self.reader, step.groups, step.team, engine)}

    def beside(self, team: Team) -> Team:
        """Return the team with the model that reads turns, if that is a separate one."""
        if self.reader == "base" or self.reader.startswith(SENTENCES):
            return team
        return team.with_beside(Policy(EMBEDDER, EMBEDDER, trained=False), self.reader, self.device)


def embedded_turns(
    embedder: str, groups: Sequence[Group], team: Team, engine: Learners
) -> dict[TurnKey, Embedding]:
    """Return every trained turn of a step as a model of the engine reads it."""
    if embedder != "base":
        return _by_model(groups, engine, EMBEDDER)
    if len({team.policies[name].base for name in team.trained}) > 1:
        first = next(team.policy_of[agent] for agent in team.names if team.policy(agent).trained)
        return _by_model(groups, engine, embedder_name(first))
    prompts, completions = embedding_samples(groups, {name: embedder_name(name) for name in team.trained})
    return _joined(list(prompts), engine.embed([*prompts.values(), *completions.values()]))


def _by_model(groups: Sequence[Group], engine: Learners, name: str) -> dict[TurnKey, Embedding]:
    reader = engine.renderer(name)
    texts = turn_texts(groups)
    prompts: list[Sample] = []
    completions: list[Sample] = []
    for before, text in texts.values():
        prompt = reader.start([Message("user", before)])
        own = reader.completion(text)[: reader.context - 1]
        known = prompt[-reader.context :]
        # A target names the hidden state of the token before it.
        prompts.append(Sample(name, known, tuple(range(1, len(known) + 1))))
        tokens = (*prompt, *own)[-reader.context :]
        completions.append(Sample(name, tokens, tuple(range(len(tokens) - len(own) + 1, len(tokens) + 1))))
    return _joined(list(texts), engine.embed([*prompts, *completions]))


def by_sentences(
    groups: Sequence[Group], encode: Callable[[Sequence[str]], Tensor]
) -> dict[TurnKey, Embedding]:
    """Return the text of every trained turn as `encode` reads it: texts → one row for each."""
    texts = turn_texts(groups)
    every = dict.fromkeys(text for both in texts.values() for text in both)
    vector = dict(zip(every, encode(list(every)).float().cpu().unbind(), strict=True)) if every else {}
    return {key: Embedding(vector[before], vector[text]) for key, (before, text) in texts.items()}


@dataclass(frozen=True, slots=True)
class Sentences:
    """A model of sentence-transformers."""

    model: Any

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return one row for each text."""
        with torch.no_grad():
            found: Tensor = self.model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return found

    def tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens the model reads of texts."""
        limit = self.model.max_seq_length
        read = self.model.tokenizer(list(texts), truncation=limit is not None, max_length=limit)
        return sum(map(len, read["input_ids"]))


@lru_cache(maxsize=1)
def load_sentences(name: str, device: str | None = None) -> Sentences:
    """Load a model of sentence-transformers; ModelError names the reason if it cannot be loaded.

    Without a `device` the library chooses.
    """
    library: Any = import_module("sentence_transformers")
    # The library knows its own models without their owner, and asks a silent hub for minutes.
    local = Path(name).is_dir()
    if not local:
        check_hub_name(name)
        local = local_only(name if "/" in name else f"sentence-transformers/{name}", "modules.json")
    try:
        model = library.SentenceTransformer(name, device=device, local_files_only=local)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"The sentence-transformers model '{name}' cannot be loaded: {reason}") from error
    return Sentences(model)


def turn_texts(groups: Sequence[Group]) -> dict[TurnKey, tuple[str, str]]:
    """Return, for every trained turn, all text that its agent had read or written before, and the text of the turn."""
    known: dict[tuple[int, int], Mapping[int, str]] = {}
    found: dict[TurnKey, tuple[str, str]] = {}
    for key, turn in turns_of(groups):
        place = key.group, key.episode
        if place not in known:
            known[place] = _read_before(groups[key.group].episodes[key.episode])
        found[key] = known[place][turn.index], turn.text
    return found


def _read_before(episode: Episode) -> dict[int, str]:
    own: dict[str, list[str]] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    texts: dict[int, str] = {}
    for turn in episode.turns:
        parts = own.setdefault(turn.agent, [])
        before = tokens.get(turn.agent, ())
        if turn.prompt_ids[: len(before)] != before:
            parts.clear()  # the agent began a new conversation
        parts.extend(message.content for message in turn.heard)
        texts[turn.index] = "\n\n".join(parts)
        parts.append(turn.text)
        tokens[turn.agent] = turn.prompt_ids + turn.completion_ids
    return texts


def _joined(keys: Sequence[TurnKey], vectors: Sequence[Tensor]) -> dict[TurnKey, Embedding]:
    half = len(keys)
    return {key: Embedding(a, b) for key, a, b in zip(keys, vectors[:half], vectors[half:], strict=True)}


def embedding_samples(
    groups: Sequence[Group], name: Mapping[str, str]
) -> tuple[dict[TurnKey, Sample], dict[TurnKey, Sample]]:
    """Return the embedders' samples (`name`: policy → embedder) of every trained turn: prompts, and completions.

    The prompt is read alone and the completion after its prompt.
    """
    prompts: dict[TurnKey, Sample] = {}
    completions: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups):
        embedder, start = name[turn.policy], len(turn.prompt_ids)
        tokens = turn.prompt_ids + turn.completion_ids
        # A target names the hidden state of the token before it.
        prompts[key] = Sample(embedder, turn.prompt_ids, tuple(range(1, start + 1)))
        completions[key] = Sample(embedder, tokens, tuple(range(start + 1, len(tokens) + 1)))
    return prompts, completions
