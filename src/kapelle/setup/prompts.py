"""Whether agents' prompts fit their models: read with the models' tokenisers, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kapelle.environments.bounded_worlds import task_of
from kapelle.errors import ConfigError, ContextError
from kapelle.models.renderer import ReadRenderer, load_renderer
from kapelle.rows import ReadsTokens
from kapelle.settings.schema import RunConfig
from kapelle.team import Agent, Team
from kapelle.types import Message, Task

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.models.renderer import ChatRenderer


def check_prompts(
    config: RunConfig,
    team: Team,
    given: Mapping[str, LanguageModel] | None = None,
    problems: int = 64,
    renderer_of: ReadRenderer = load_renderer,
) -> tuple[str, ...]:
    """Raise ContextError when a first prompt of the first tasks leaves no room in the model's context.

    Loads tokenisers, not models. Later prompts depend on the episode so far, and are checked during it. Returns what is to
    be said of the models' chat templates and of answers that have less room than `max_tokens`.
    """
    environment = config.environment
    memory = {path: model.renderer for path, model in (given or {}).items()}
    renderers = {
        path: memory.get(path) or renderer_of(path, config.model) for path in set(team.bases.values())
    }
    _check_readers(config, team, renderers)
    longest: dict[str, int] = {}
    readers = [(agent, team.policy(agent.name)) for agent in team.agents]
    here = [(agent, renderers[team.bases[p.base]]) for agent, p in readers if p.endpoint is None]
    for split in ("train", "test"):
        size = environment.size(split)
        for index in range(min(problems, problems if size is None else size)):
            task = task_of(environment, split, index)
            for agent, renderer in here:
                tokens = _tokens(agent, task, renderer)
                longest[agent.name] = max(tokens, longest.get(agent.name, 0))
    notes = [note for renderer in renderers.values() for note in renderer.notes]
    for agent, renderer in here:
        tokens, most = longest.get(agent.name, 0), agent.sampling.max_tokens
        if tokens + most > renderer.context:
            several = " An episode fails whose next prompt does not fit with it." if len(here) > 1 else ""
            notes.append(
                f"Agent '{agent.name}' may write {most} tokens (`max_tokens`), but after a prompt of {tokens} only "
                f"{renderer.context - tokens} fit: the model reads {renderer.context}. A longer answer is cut off there.{several}"
            )
    need = config.algorithm.build().critic
    if need is not None and need.view == "central":
        most = sum(longest.get(agent.name, 0) + agent.sampling.max_tokens for agent, _ in here)
        reads = min(renderers[team.bases[critic.base]].context for critic in team.critics.values())
        if most > reads:
            notes.append(
                f"The central critic reads what all agents read and wrote: first prompts and answers of `max_tokens` are {most} "
                f"tokens, and its model reads {reads}. A run stops at the first episode that is longer for its critic."
            )
    return tuple(dict.fromkeys(notes))


def _tokens(agent: Agent, task: Task, renderer: ChatRenderer) -> int:
    """Return the tokens of an agent's first prompt for a task; ContextError when no answer fits after it."""
    messages = [Message("system", agent.system)] if agent.system else []
    messages.append(Message("user", (agent.prompt or "{question}").replace("{question}", task.question)))
    try:
        tokens = len(renderer.start(messages))
    except ContextError as error:
        raise ContextError(f"Agent '{agent.name}' cannot read task {task.id}. {error}") from None
    if tokens >= renderer.context:
        raise ContextError(
            f"The prompt of agent '{agent.name}' for task {task.id} has {tokens} tokens; the model reads "
            f"{renderer.context}. Use a model with a longer context (`model.embedded.context` for the "
            "embedded one), or shorter prompts."
        )
    return tokens


def _check_readers(config: RunConfig, team: Team, renderers: Mapping[str, ChatRenderer]) -> None:
    """Refuse weights beside the team for which the token ids of the policies that they read mean other texts."""
    for signal in config.algorithm.build().needs:
        pairs = signal.readers(team) if isinstance(signal, ReadsTokens) else {}
        for policy, reader in pairs.items():
            own, other = (team.bases[team.every[name].base] for name in (policy, reader))
            if not renderers[own].same_tokens(renderers[other]):
                raise ConfigError(
                    f"Policy '{policy}' samples tokens of '{own}', but '{other}' would read them with another "
                    f"vocabulary: its log-probs would be of other texts. Name a model of the same family as the "
                    f"{reader.split(':')[0]} of '{policy}'."
                )
