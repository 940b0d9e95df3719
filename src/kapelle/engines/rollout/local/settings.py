"""Settings of the local rollout engine, which samples in the trainer's process."""

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
    """Settings of the local rollout engine, which samples in the trainer's process."""

    name: Literal["local"] = "local"
    max_rows: Annotated[int, FROM_HERE_ON] = Field(default=1024, ge=1)
    """The maximum number of rows (completions) of each base model that are decoded at the same time."""
    kept_tokens: Annotated[int, FROM_HERE_ON] = Field(default=65_536, ge=0)
    """The maximum number of tokens in the KV cache, for each base model, that are kept from finished rows so that
    prompts which continue these rows can reuse them. With 0, no finished rows are kept."""
    kv_gib: Annotated[float | None, FROM_HERE_ON] = Field(default=None, gt=0.0, allow_inf_nan=False)
    """The size of the KV cache of each base model in GiB, including kept rows. If the cache is full, new rows wait for
    space and the newest rows are preempted. With None, the KV cache uses at most 40 % of the free memory of a GPU and
    has no limit on a CPU."""

    graphs: Annotated[Literal["auto", "off"], FROM_HERE_ON] = "auto"
    """Whether sampling steps are recorded and replayed. With `auto`, CUDA graphs are used on a GPU, and steps are not
    recorded on a CPU."""

    patience: Annotated[float, FROM_HERE_ON] = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """The maximum time in seconds to wait, while nothing changes, for episodes that are waiting for an environment,
    tool, judge or endpoint. With 0, runs with slow environments are not exactly repeatable."""

    @field_validator("graphs", mode="before")
    @classmethod
    def _as_written(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads off as false

    def check_recording(self, model: LanguageModel) -> None:
        """Raise ModelError if the model records routing but has to be decoded without a KV cache."""
        from kapelle.engines.rollout.local.engine import check_recording

        check_recording(model)

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> LocalEngine:
        """Return the local engine, which samples from the trainer's models."""
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
