"""Loads the models of a team into memory and builds the engines of its policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.embeddings import Embeddings
from kapelle.algorithms.signals.reference import ReferenceLogProbs
from kapelle.engines.rollout.compose import ComposedEngine
from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.protocol import EngineSettings, Request, RolloutEngine
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.engines.train.protocol import TrainEngine, TrainEngineSettings, TrainSetup, UpdateLimits
from kapelle.environment import Recorded, Scripted, offers
from kapelle.errors import ConfigError, ModelError
from kapelle.models.language_model import LanguageModel, copy_language_model, load_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.models.weights import hash_of_base
from kapelle.runs.checkpoint_contents import load_policies
from kapelle.runtime.deadlines import call
from kapelle.runtime.randomness import derive_seed
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.base import Settings
from kapelle.settings.schema import ModelConfig, RunConfig
from kapelle.team import Place, Team
from kapelle.types import Message

ENDPOINT_SECONDS = 120.0
"""Maximum time in seconds of one request to an endpoint. The total time of a request and its retries is limited by `engine.timeout`."""
IN_MEMORY = "in-memory"
"""The path of a model that the caller passed as an object instead of a path."""


def name_model(sections: Mapping[str, Any], given: dict[str, LanguageModel]) -> dict[str, Any]:
    """Accept either a path or a model in memory as the section `model`. A model in memory is added to `given`."""
    model = sections.get("model")
    if isinstance(model, LanguageModel):
        given[IN_MEMORY] = model
        return {**sections, "model": {"path": IN_MEMORY}}
    if model is None and "model" in sections:
        raise ConfigError(
            "`model` is None. Give a folder, a hub model or 'embedded', the tiny built-in model."
        )
    if model is not None and not isinstance(model, str | Path | Mapping | Settings):
        raise ConfigError(
            f"`model` is of type {type(model).__name__}. Give a folder, a hub model or "
            "kapelle.LanguageModel(model, tokenizer)."
        )
    return {**sections, "model": {"path": str(model)}} if isinstance(model, str | Path) else dict(sections)


def load_models(
    team: Team, config: ModelConfig, given: Mapping[str, LanguageModel]
) -> dict[str, LanguageModel]:
    """Return every base model of a team on its device. Models in `given` are used unchanged, and other models are loaded.

    Frozen base models with the same path, data type and device share one model in memory. If a base model is on CUDA,
    `config.tf32` is applied to the whole process.
    """
    models: dict[str, LanguageModel] = {}
    frozen: dict[tuple[str, Place], LanguageModel] = {}
    taken: set[int] = set()
    for base, path in team.bases.items():
        place, trained = team.places.get(base, Place(config.dtype, config.device)), base in team.trained_bases
        model = given.get(path)
        if not trained and (path, place) in frozen:
            model = frozen[path, place]
        elif model is None:
            template = config.chat_template if path == config.path else None  # other models have their own
            own = {"path": path, "dtype": place.dtype, "device": place.device, "chat_template": template}
            model = load_language_model(config.model_copy(update=own), trained=trained)
        elif id(model) in taken:  # a second base with this model, which is trained or on another device
            if model.bank.adapters:
                raise ModelError(
                    f"The team needs the model '{path}' twice, but the given model in memory still has "
                    "adapters from earlier use. Pass a new model."
                )
            model = copy_language_model(model, path)
        if not trained:
            frozen[path, place] = model
        taken.add(id(model))
        models[base] = model.to(place.device)
    if any(model.device.type == "cuda" for model in models.values()):
        # This flag is consistent with torch's other flag, and does not affect matrix products on the CPU.
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
    return models


def load_weights(
    team: Team, models: Mapping[str, LanguageModel], folders: Mapping[str, Path], seed: int
) -> Callable[[str], Mapping[str, torch.Tensor]]:
    """Add the adapters of a team to its models and load the saved weights, for a team that is not trained.

    The argument `models` maps the names of base models to models. The argument `folders` maps policies to folders of
    weights, which take precedence over `policy.past`. Returns a function that maps the name of a policy to its weights.
    Raises ModelError for weights that do not fit the model or were trained on another base model.
    """
    for policy in team.policies.values():
        if policy.endpoint is None and policy.lora is not None:
            bank = models[policy.base].bank
            bank.add(policy.name, policy.lora, derive_seed(seed, "adapter", policy.name))

    def weights(name: str) -> Mapping[str, torch.Tensor]:
        policy = team.policies[name]
        model = models[policy.base]
        return model.base_parameters() if policy.lora is None else model.bank.parameters(name)

    def take(name: str, given: Mapping[str, torch.Tensor]) -> None:
        copy_weights(weights(name), given, f"policy '{name}'")

    past = {policy.name: Path(policy.past) for policy in team.policies.values() if policy.past}
    saved = {**past, **folders}
    bases = {team.policies[name].base for name in saved}
    load_policies(saved, team, weights, take, {base: hash_of_base(models[base]) for base in bases})
    return weights


def build_engine(
    config: RunConfig,
    models: Mapping[str, LanguageModel],
    team: Team,
    others: RolloutEngine | None = None,
) -> RolloutEngine:
    """Return the engine for all policies of a team, which combines the engine of the recipe with an engine for endpoints if needed.

    The argument `others` is an engine that samples for the policies that it holds.
    """
    engines: list[RolloutEngine] = [] if others is None else [others]
    taken = () if others is None else others.policies
    local = [
        policy for name, policy in team.policies.items() if policy.endpoint is None and name not in taken
    ]
    if local:
        engines.append(cast("EngineSettings", config.engine).build(models, local))
    remote = {name: policy.endpoint for name, policy in team.policies.items() if policy.endpoint is not None}
    if remote:
        engines.append(EndpointEngine(remote, min(ENDPOINT_SECONDS, config.patience.engine)))
    return engines[0] if len(engines) == 1 else ComposedEngine(engines)


def build_train_engine(
    config: RunConfig,
    algorithm: Algorithm,
    team: Team,
    models: Mapping[str, LanguageModel],
    ranks: Ranks = ALONE,
) -> TrainEngine:
    """Return the train engine of the recipe, which holds the trained weights.

    The argument `models` maps the names of base models to models. The argument `ranks` describes the processes that
    build the same engine.
    """
    training = config.training
    embeddings = algorithm.need(Embeddings)
    setup = TrainSetup(
        models,
        [*team.policies.values(), *team.beside.values()],
        list(team.critics.values()),
        config.optimizer,
        UpdateLimits(
            None if training.microbatch_tokens == "auto" else training.microbatch_tokens,
            training.parity_tolerance,
            training.non_finite,
            max(1, training.steps * algorithm.update.epochs * algorithm.update.minibatches),
            training.gradient_checkpointing,
        ),
        config.seed,
        references=algorithm.need(ReferenceLogProbs) is not None,
        embedders=embeddings is not None and embeddings.reader == "base",
        ranks=ranks,
    )
    return cast("TrainEngineSettings", config.train_engine).build(setup)


def teacher(config: RunConfig, team: Team, models: Mapping[str, LanguageModel]) -> ScriptedEngine:
    """Return an engine that generates all completions from the records or the script of the environment, in the models' tokens."""
    environment = config.environment
    assert offers(environment, Recorded) or offers(environment, Scripted), (
        "`check_run` raises an error if there are no demonstrations"
    )

    def demonstrate(request: Request) -> str | Message:
        if offers(environment, Recorded):
            turn = sum(message.role == "assistant" for message in request.messages)
            return environment.recorded(request.agent, request.task, turn, request.sample)
        return environment.script(request.agent, request.task, request.messages, request.seed)

    local = {name: policy for name, policy in team.policies.items() if policy.endpoint is None}
    renderers = {name: models[policy.base].renderer for name, policy in local.items()}

    def demonstration(request: Request) -> str:
        what, seconds = "`script` of the environment", config.patience.environment
        answer = call(what, "environment", seconds, demonstrate, request)
        if isinstance(answer, str):
            return answer
        return renderers[request.policy].answer(answer) if request.policy in renderers else answer.content

    return ScriptedEngine(dict.fromkeys(team.policies, demonstration), renderers)
