"""Frozen models that an environment asks beside the team, such as judges: each is loaded once, when it is first asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kapelle.engines.rollout.judge import ask_engine
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
"""Name of the policy that answers."""


class FrozenModels:
    """The models that were asked so far, each in an engine of its own, which samples greedily."""

    def __init__(self, config: ModelConfig) -> None:
        """Take the section `model`: its type, its device and the rest hold for these models too."""
        self._config = config
        self._engines: dict[str, RolloutEngine] = {}

    def ask(self, model: FrozenModel) -> Callable[[Sequence[Message]], Awaitable[str]]:
        """Return what asks a model: it takes a conversation and returns the reply's text."""
        sampling = Sampling(max_tokens=model.max_tokens, temperature=0.0)

        async def asked(messages: Sequence[Message]) -> str:
            if model.path not in self._engines:
                self._engines[model.path] = self._load(model.path)
            return await ask_engine(self._engines[model.path], FROZEN, sampling)(messages)

        return asked

    def close(self) -> None:
        """Free the models."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _load(self, path: str) -> RolloutEngine:
        """Load a model, or an adapter on its base; EngineError, which no episode can be blamed for, where that fails."""
        before = capture_random()  # the run goes on as if nothing had been loaded
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
