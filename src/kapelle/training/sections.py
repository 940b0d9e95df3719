"""What `Trainer` takes as keywords, for editors and type checkers: a section is its settings, or a dictionary of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kapelle.errors import ConfigError
from kapelle.models.language_model import LanguageModel
from kapelle.settings.base import Settings
from kapelle.settings.cluster import RayConfig
from kapelle.settings.dictionaries import (
    CheckpointDict,
    EpisodeDict,
    EpisodesDict,
    EvaluationDict,
    GraderDict,
    ModelDict,
    OptimizerDict,
    RayDict,
    RecordDict,
    RewardModelDict,
    TeamDict,
    TrackerDict,
    TrainingDict,
    WarmupDict,
)
from kapelle.settings.keeping import CheckpointConfig, EpisodesConfig, RecordConfig, TrackerConfig
from kapelle.settings.schema import (
    EpisodeConfig,
    EvaluationConfig,
    GraderConfig,
    ModelConfig,
    OptimizerConfig,
    RewardModelConfig,
    TeamConfig,
    TrainingConfig,
    WarmupConfig,
)
from kapelle.settings.sections import AlgorithmSettings, EnvironmentSettings, Section, WorkflowSettings

if TYPE_CHECKING:
    from kapelle.training.observer import Observer

Plain = Mapping[str, Any]
"""Settings as a dictionary that is put together elsewhere, or of a plug-in: `{"name": "grpo", "group_size": 8}`."""


class SharedSections(TypedDict, total=False):
    """The sections that `kapelle.train` hands on as they are."""

    name: str
    description: str
    seed: int
    team: TeamConfig | TeamDict | Plain
    train_engine: Section | Plain
    warmup: WarmupConfig | WarmupDict | Plain | None
    reward_model: RewardModelConfig | RewardModelDict | Plain | None
    optimizer: OptimizerConfig | OptimizerDict | Plain
    episode: EpisodeConfig | EpisodeDict | Plain
    grader: GraderConfig | GraderDict | Plain
    training: TrainingConfig | TrainingDict | Plain
    evaluation: EvaluationConfig | EvaluationDict | Plain
    checkpoint: CheckpointConfig | CheckpointDict | Plain
    trackers: Sequence[TrackerConfig | TrackerDict | Plain]
    episodes: EpisodesConfig | EpisodesDict | Plain
    record: RecordConfig | RecordDict | Plain
    ray: RayConfig | RayDict | Plain


class Sections(SharedSections, total=False):
    """All sections of a run, see `RunConfig`."""

    model: str | LanguageModel | ModelConfig | ModelDict | Plain
    environment: EnvironmentSettings | Plain
    workflow: WorkflowSettings | Plain
    algorithm: AlgorithmSettings | Plain
    listener: Observer
    """The former name of `observer`."""


def engine_of(said: dict[str, Any], engine: Any, run_dir: Any, observer: Any) -> Any:
    """Return the engine; settings of one become a section of `said`. ConfigError for what is no such thing."""
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise ConfigError(f"`run_dir` is {run_dir!r}. Give the path of a folder.")
    missing = [name for name in ("phase", "warmup", "step", "evaluation") if not hasattr(observer, name)]
    if missing:
        raise ConfigError(
            f"`observer` is {type(observer).__name__}, which has no `{missing[0]}`. Give what `training.observer` describes."
        )
    if isinstance(engine, str | Mapping | Settings):
        said["engine"] = {"name": engine} if isinstance(engine, str) else engine
        return None
    if engine is not None and not hasattr(engine, "generate"):
        raise ConfigError(
            f"`engine` is {type(engine).__name__}, which samples nothing. Give an engine, or its settings: {{'name': 'local'}}."
        )
    return engine
