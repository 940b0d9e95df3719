"""Measures the lengths of the first prompts of tasks with the tokenisers of the models. No model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kapelle.engines.rollout.protocol import Renderer
from kapelle.environment import task_of
from kapelle.errors import ConfigError, ContextError
from kapelle.rows import ReadsTokens, agent_renderer
from kapelle.settings.checks import RunToCheck
from kapelle.settings.schema import RunConfig
from kapelle.setup.problems import Fits
from kapelle.team import Agent, Team
from kapelle.types import Split, Task
from kapelle.workflow import opening

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.models.renderer import ChatRenderer, ReadRenderer

Renderers: TypeAlias = "Mapping[str, ChatRenderer]"
"""Mapping from the path of a base model to the renderer of its prompts."""


def renderers_of(run: RunToCheck, given: Mapping[str, LanguageModel], read: ReadRenderer) -> Renderers:
    """Return the renderers of a team's base models by path. Renderers of models that are not in `given` are read from files."""
    paths = dict.fromkeys(run.team.bases.values())
    return {path: given[path].renderer if path in given else read(path, run.config.model) for path in paths}


def short_enough(config: RunConfig, team: Team, renderer_of_policy: Callable[[str], Renderer]) -> Fits | None:
    """Return a function that tests whether a task's first prompts are within `tasks.max_prompt_tokens`, or None if there is no limit.

    Agents that are endpoints are not tested, because only their servers can count tokens.
    """
    most = config.tasks.max_prompt_tokens
    if most is None:
        return None
    limits = []
    for agent in team.agents:
        policy = team.policy(agent.name)
        if policy.endpoint is None:
            renderer = agent_renderer(agent, renderer_of_policy(policy.name))
            limit = renderer.context - agent.sampling.max_tokens if most == "context" else most
            limits.append((agent, renderer, limit))

    def fits(task: Task) -> bool:
        try:
            return all(
                len(renderer.start(opening(agent, task))) <= limit for agent, renderer, limit in limits
            )
        except ContextError:  # the prompt is too long to be counted
            return False

    return fits


def _short_enough(run: RunToCheck, renderers: Renderers) -> Fits | None:
    bases, policies = run.team.bases, run.team.policies
    return short_enough(run.config, run.team, lambda policy: renderers[bases[policies[policy].base]])


def excluded_tasks(run: RunToCheck, renderers: Renderers) -> dict[Split, tuple[int, str]]:
    """Return how many tasks of each finite split are excluded by `tasks.max_prompt_tokens`, with a note.

    Raises ConfigError if all tasks are excluded.
    """
    environment, most = run.config.environment, run.config.tasks.max_prompt_tokens
    fits, found = _short_enough(run, renderers), dict[Split, tuple[int, str]]()
    limit = "too many tokens for the model" if most == "context" else f"more than {most} tokens"
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits if fits else ():
        size = environment.size(split)
        if not size or fits is None:  # the split is generated, or empty
            continue
        longer = size - sum(fits(task_of(environment, split, index)) for index in range(size))
        if longer == size > 0:
            raise ConfigError(
                f"`tasks.max_prompt_tokens: {most}` excludes all {size} tasks of `{environment.name}` ({split}). "
                "Raise the limit, or set a lower `sampling.max_tokens`."
            )
        found[split] = (
            longer,
            f"{split}: {longer} of {size} tasks have a first prompt of {limit} and are excluded",
        )
    return found


PROMPTS = 64
"""The number of tasks per split for which the length of the first prompt is checked."""


def check_prompts(run: RunToCheck, renderers: Renderers) -> tuple[str, ...]:
    """Raise ContextError if a first prompt of one of the first tasks leaves no room in the model's context.

    Tokenisers are loaded, but models are not. Later prompts depend on the episode, so their lengths are checked during
    the episode. Returns notes about chat templates and about completions that have less room than `max_tokens`.
    """
    team, environment = run.team, run.config.environment
    _check_readers(run, renderers)
    longest: dict[str, int] = {}
    readers = [(agent, team.policy(agent.name)) for agent in team.agents]
    here = [(a, agent_renderer(a, renderers[team.bases[p.base]])) for a, p in readers if p.endpoint is None]
    fits = _short_enough(run, renderers)
    for split in ("train", "test"):
        size = environment.size(split)
        for index in range(PROMPTS if size is None else min(PROMPTS, size)):
            task = task_of(environment, split, index)
            for agent, renderer in here if fits is None or fits(task) else ():
                tokens = _tokens(agent, task, renderer)
                longest[agent.name] = max(tokens, longest.get(agent.name, 0))
    notes = [note for renderer in renderers.values() for note in renderer.notes]
    for agent, renderer in here:
        tokens, most = longest.get(agent.name, 0), agent.sampling.max_tokens
        if tokens + most > renderer.context:
            notes.append(
                f"Agent '{agent.name}' may generate {most} tokens (`max_tokens`), but after a prompt of "
                f"{tokens} tokens only {renderer.context - tokens} fit, because the model's context has "
                f"{renderer.context} tokens."
            )
        notes += _check_form(agent, renderer)
    need = run.algorithm.critic
    if need is not None and need.view == "central":
        most = sum(longest.get(agent.name, 0) + agent.sampling.max_tokens for agent, _ in here)
        reads = min(renderers[team.bases[critic.base]].context for critic in team.critics.values())
        if most > reads:
            notes.append(
                f"The central critic reads the prompts and completions of all agents: up to {most} tokens in "
                f"the first round, but its model's context has {reads} tokens."
            )
    return tuple(dict.fromkeys(notes))


def _tokens(agent: Agent, task: Task, renderer: ChatRenderer) -> int:
    """Return the number of tokens of an agent's first prompt for a task. Raises ContextError if no completion fits after the prompt."""
    try:
        tokens = len(renderer.start(opening(agent, task)))
    except ContextError as error:
        raise ContextError(f"Agent '{agent.name}' cannot read task {task.id}. {error}") from None
    if tokens >= renderer.context:
        raise ContextError(
            f"The prompt of agent '{agent.name}' for task {task.id} has {tokens} tokens, but the model's "
            f"context has {renderer.context}. Use a model with a longer context (`model.embedded.context`), "
            "or shorter prompts."
        )
    return tokens


def _check_form(agent: Agent, renderer: ChatRenderer) -> tuple[str, ...]:
    """Raise ConfigError if no completion within `max_tokens` tokens can satisfy the constraint.

    Returns warnings for the user.
    """
    constraint, most = agent.sampling.constraint, agent.sampling.max_tokens
    if constraint is None or constraint.is_legal:
        return ()
    if constraint.kind == "choices":
        lengths = {text: len(renderer.completion(text)) for text in json.loads(constraint.text)}
        text = max(lengths, key=lambda each: lengths[each])
        if lengths[text] > most:
            raise ConfigError(
                f"The choice {text[:60]!r} of agent '{agent.name}' needs {lengths[text]} tokens. Set "
                f"`max_tokens: {lengths[text]}`."
            )
        return ()
    from kapelle.models.token_masks import TokenMasks

    tokenizer = renderer.tokenizer
    masks = TokenMasks(tokenizer, max(tokenizer.get_vocab().values()) + 1, renderer.end_ids)
    try:
        fits = masks.fits(constraint, most)
    except ConfigError as error:
        raise ConfigError(f"Agent '{agent.name}': {error}") from None
    if fits:
        return ()
    note = (
        f"Agent '{agent.name}' may generate only {most} tokens, but no completion of its {constraint.kind} that "
        "is this short"
    )
    if fits is False:
        raise ConfigError(f"{note} exists. Set a higher `max_tokens`.")
    return (f"{note} was found. Set a higher `max_tokens`.",)


def _check_readers(run: RunToCheck, renderers: Renderers) -> None:
    """Raise ConfigError for reference models and critics whose token ids differ from those of the policies whose tokens they process."""
    team = run.team
    for signal in run.algorithm.needs:
        pairs = signal.readers(team) if isinstance(signal, ReadsTokens) else {}
        for policy, reader in pairs.items():
            own, other = (team.bases[team.every[name].base] for name in (policy, reader))
            if not renderers[own].same_tokens(renderers[other]):
                raise ConfigError(
                    f"Policy '{policy}' samples tokens of '{own}', but '{other}' has a different vocabulary. "
                    f"Use a model of the same family as the {reader.split(':')[0]} of '{policy}'."
                )
