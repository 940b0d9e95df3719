"""Settings of the rollout engine in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from kapelle.engines.rollout.protocol import AllowsInterrupts, HoldsToConstraints, ReadsImages, RecordsRouting
from kapelle.settings.base import FROM_HERE_ON, Settings
from kapelle.team import Policy

if TYPE_CHECKING:
    from kapelle.engines.rollout.local.engine import LocalEngine
    from kapelle.models.language_model import LanguageModel


class Local(Settings, AllowsInterrupts, HoldsToConstraints, RecordsRouting, ReadsImages):
    """Settings of the engine in this process."""

    name: Literal["local"] = "local"
    max_rows: Annotated[int, FROM_HERE_ON] = Field(default=1024, ge=1)
    """Maximum rows in flight."""
    kept_tokens: Annotated[int, FROM_HERE_ON] = Field(default=65_536, ge=0)
    """Maximum KV cache, in tokens, that is kept of finished rows for prompts that continue them, for each base model; 0
    keeps none."""
    kv_gib: Annotated[float | None, FROM_HERE_ON] = Field(default=None, gt=0.0, allow_inf_nan=False)
    """GiB for the KV cache of each base model, including kept rows; rows wait until there is room, and the newest are
    preempted. None takes 0.4 of a GPU's free memory, and sets no limit on a CPU."""

    graphs: Annotated[Literal["auto", "off"], FROM_HERE_ON] = "auto"
    """Whether sampling steps are recorded and replayed: `auto` uses CUDA graphs on a GPU and does not record on a CPU."""

    patience: Annotated[float, FROM_HERE_ON] = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """Maximum wait in seconds, while nothing happens, for episodes that wait for an environment, tool, judge or endpoint;
    with 0, a run with slow environments is not exactly repeatable."""

    @field_validator("graphs", mode="before")
    @classmethod
    def _as_written(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads off as false

    def check_recording(self, model: LanguageModel) -> None:
        """Raise ModelError for a model with recorded routing that decodes without a KV cache."""
        from kapelle.engines.rollout.local.engine import check_recording

        check_recording(model)

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> LocalEngine:
        """Return the engine on the trainer's models."""
        from kapelle.engines.rollout.local.engine import LocalEngine
        from kapelle.engines.rollout.local.step_graphs import nowhere, on_cuda

        recorder_on = on_cuda if self.graphs == "auto" else nowhere
        return LocalEngine(
            models,
            policies,
            self.max_rows,
            self.kept_tokens,
            recorder_on=recorder_on,
            patience=self.patience,
            kv_bytes=None if self.kv_gib is None else int(self.kv_gib * 2**30),
        )
