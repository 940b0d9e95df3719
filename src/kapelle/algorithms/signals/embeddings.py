"""Compute embeddings of turns: a frozen model maps what an agent read and what it wrote to vectors.

The setting `embedder` selects the model:

- `base`, if all trained agents have the same base model: this model with its initial weights reads the exact tokens.
- `base`, with several base models: the model of the first trained agent reads text, so that all vectors are in one space.
- The path or hub name of a model: this model reads text. The model is loaded in addition to the team's models and acts for no
  agent.
- `sentence-transformers:NAME`: a model of the library sentence-transformers reads text (`pip install 'kapelle[embed]'`).

For models that read text, the input is the agent's whole conversation so far, with messages joined by empty lines. The model
reads this as one user message, truncated to the last tokens that fit its context.

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
from kapelle.rows import Beside, Embedding, Learners, Loads, ReadsText, Sample, Sampled, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.team import EMBEDDER, Policy, Team, embedder_name
from kapelle.types import Episode, Group, Message

SENTENCES = "sentence-transformers:"
"""The prefix of names of models of the library sentence-transformers."""


@dataclass(frozen=True, slots=True)
class Embeddings(Beside, Loads, ReadsText):
    """A signal that computes `Signals.embedding`."""

    reader: str = "base"
    """The embedding model, which is `base`, the path or hub name of a model, or `sentence-transformers:NAME`."""
    device: str | None = None
    """The device of an embedding model other than `base`. With None, the device is `model.device`, or the library selects a
    device."""

    def load(self) -> None:
        """Load the model if it is a model of sentence-transformers. Raises ModelError if the model cannot be loaded."""
        if self.reader.startswith(SENTENCES):
            load_sentences(self.reader.removeprefix(SENTENCES), self.device)

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Embedding]]:
        """Return the embedding of every trained turn. Raises ModelError if the model cannot be loaded."""
        if self.reader.startswith(SENTENCES):
            encode = load_sentences(self.reader.removeprefix(SENTENCES), self.device)
            return {"embedding": by_sentences(step.groups, encode)}
        return {"embedding": embedded_turns(self.reader, step.groups, step.team, engine)}

    def beside(self, team: Team) -> Team:
        """Return the team with the embedding model as an additional policy if the engine loads a separate model for it."""
        if self.reader == "base" or self.reader.startswith(SENTENCES):
            return team
        return team.with_beside(Policy(EMBEDDER, EMBEDDER, trained=False), self.reader, self.device)


def embedded_turns(
    embedder: str, groups: Sequence[Group], team: Team, engine: Learners
) -> dict[TurnKey, Embedding]:
    """Return the embedding of every trained turn of a step, computed by a model of the train engine."""
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
        fitting = prompt[-reader.context :]
        # A target selects the hidden state of the token before it.
        prompts.append(Sample(name, fitting, tuple(range(1, len(fitting) + 1))))
        tokens = (*prompt, *own)[-reader.context :]
        completions.append(Sample(name, tokens, tuple(range(len(tokens) - len(own) + 1, len(tokens) + 1))))
    return _joined(list(texts), engine.embed([*prompts, *completions]))


def by_sentences(
    groups: Sequence[Group], encode: Callable[[Sequence[str]], Tensor]
) -> dict[TurnKey, Embedding]:
    """Return the embedding of every trained turn, computed by the function `encode`, which maps each string to one row."""
    texts = turn_texts(groups)
    distinct = dict.fromkeys(text for pair in texts.values() for text in pair)
    vector: dict[str, Tensor] = {}
    if distinct:
        vector = dict(zip(distinct, encode(list(distinct)).float().cpu().unbind(), strict=True))
    return {key: Embedding(vector[before], vector[text]) for key, (before, text) in texts.items()}


@dataclass(frozen=True, slots=True)
class Sentences:
    """An embedding model of the library sentence-transformers."""

    model: Any

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings as one row per string."""
        with torch.no_grad():
            rows: Tensor = self.model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return rows

    def tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens that the model reads for the given strings."""
        limit = self.model.max_seq_length
        encoded = self.model.tokenizer(list(texts), truncation=limit is not None, max_length=limit)
        return sum(map(len, encoded["input_ids"]))


@lru_cache(maxsize=1)
def load_sentences(name: str, device: str | None = None) -> Sentences:
    """Load the model if it is a model of sentence-transformers. Raises ModelError if the model cannot be loaded.

    The model is loaded on `device`, or on a device that the library selects if `device` is None.
    """
    library: Any = import_module("sentence_transformers")
    # The library accepts names of its own models without their owner, and can wait minutes for a hub that does not respond.
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
    """Return, for every trained turn, all text that its agent read or wrote before the turn, and the text of the turn."""
    before: dict[tuple[int, int], Mapping[int, str]] = {}
    texts: dict[TurnKey, tuple[str, str]] = {}
    for key, turn in turns_of(groups):
        place = key.group, key.episode
        if place not in before:
            before[place] = _read_before(groups[key.group].episodes[key.episode])
        texts[key] = before[place][turn.index], turn.text
    return texts


def _read_before(episode: Episode) -> dict[int, str]:
    own: dict[str, list[str]] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    texts: dict[int, str] = {}
    for turn in episode.turns:
        parts = own.setdefault(turn.agent, [])
        before = tokens.get(turn.agent, ())
        if turn.prompt_ids[: len(before)] != before:
            parts.clear()  # the agent started a new conversation
        parts.extend(message.content for message in turn.new_messages)
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
    """Return the samples that the embedding models read for every trained turn: the prompts, and the completions after their prompts.

    The argument `name` maps each policy to the name of its embedding model.
    """
    prompts: dict[TurnKey, Sample] = {}
    completions: dict[TurnKey, Sample] = {}
    for key, turn in turns_of(groups):
        embedder, start = name[turn.policy], len(turn.prompt_ids)
        tokens = turn.prompt_ids + turn.completion_ids
        # A target selects the hidden state of the token before it.
        prompts[key] = Sample(embedder, turn.prompt_ids, tuple(range(1, start + 1)))
        completions[key] = Sample(embedder, tokens, tuple(range(start + 1, len(tokens) + 1)))
    return prompts, completions
