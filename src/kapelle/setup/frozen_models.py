"""Provides the frozen models that an environment calls, such as judges. Each model is loaded once, when it is first called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kapelle.engines.rollout.judge import query_engine
from kapelle.engines.rollout.local.settings import Local
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.environment import FrozenModel
from kapelle.errors import EngineError, KapelleError
from kapelle.models.adapters import base_and_adapter, read_lora
from kapelle.runtime.randomness import capture_random, restore_random
from kapelle.settings.schema import ModelConfig
from kapelle.setup.model_loading import load_models, load_weights
from kapelle.team import Agent, Policy, Team
from kapelle.types import Message, Sampling

FROZEN = "frozen"
"""The policy name of a frozen model."""


class FrozenModels:
    """The frozen models of an environment. Each model has its own engine and samples greedily."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the collection with the section `model` of the settings, which also applies to the frozen models."""
        self._config = config
        self._engines: dict[str, RolloutEngine] = {}

    def ask(self, model: FrozenModel) -> Callable[[Sequence[Message]], Awaitable[str]]:
        """Return a function that sends a conversation to a model and returns the content of the model's reply."""
        sampling = Sampling(max_tokens=model.max_tokens, temperature=0.0)

        async def reply(messages: Sequence[Message]) -> str:
            if model.path not in self._engines:
                self._engines[model.path] = self._load(model.path)
            return await query_engine(self._engines[model.path], FROZEN, sampling)(messages)

        return reply

    def close(self) -> None:
        """Free the memory of the models."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _load(self, path: str) -> RolloutEngine:
        """Load a model, or an adapter on its base model.

        Raises EngineError if loading fails, because the failure is not caused by an episode.
        """
        before = capture_random()  # loading a model must not change the random draws of the run
        try:
            base, adapter = base_and_adapter(path)
            lora = None if adapter is None else read_lora(Path(adapter))
            policy = Policy(FROZEN, lora=lora, trained=False, past=adapter)
            team = Team.alone(Agent(FROZEN), policy, {"base": base})
            models = load_models(team, self._config.model_copy(update={"path": base}), {})
            weights = load_weights(team, models, {}, 0)
            engine = Local().build(models, [policy])
            if adapter is not None:
                engine.load(FROZEN, weights(FROZEN), 0)
        except KapelleError as error:
            raise EngineError(f"The judge '{path}' cannot be loaded: {error}") from error
        finally:
            restore_random(before)
        return engine
