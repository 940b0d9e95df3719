"""Settings of the engine `vllm`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from kapelle.engines.rollout.vllm.versions import installed, mixes_rightly, need_installed
from kapelle.settings.base import FROM_HERE_ON, Settings
from kapelle.team import Policy
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.engines.rollout.vllm.engine import VllmEngine
    from kapelle.models.language_model import LanguageModel

OURS = ("model", "dtype", "logprobs_mode", "enable_lora", "max_loras", "max_lora_rank", "enable_sleep_mode")
"""Arguments of vLLM on which the engine depends."""


class Vllm(Settings):
    """Settings of the engine that samples with vLLM in this process."""

    name: Literal["vllm"] = "vllm"
    kv_gib: Annotated[float, FROM_HERE_ON] = Field(4.0, gt=0.0, allow_inf_nan=False)
    """GiB for keys and values of each base model."""
    max_rows: Annotated[int, FROM_HERE_ON] = Field(256, ge=1)
    """Most rows in flight on each base model."""
    patience: Annotated[float, FROM_HERE_ON] = Field(60.0, ge=0.0, allow_inf_nan=False)
    """Seconds for which rows wait for busy episodes, as in the engine `local`."""
    options: Annotated[Mapping[str, Json], FROM_HERE_ON] = Field(default_factory=dict)
    """Further engine arguments of vLLM by name, such as `tensor_parallel_size`."""

    @field_validator("options")
    @classmethod
    def _not_ours(cls, value: Mapping[str, Json]) -> Mapping[str, Json]:
        taken = sorted(set(value) & set(OURS))
        if taken:
            raise ValueError(f"`{taken[0]}` is set by kapelle: its value follows from team and model")
        return value

    def check(self) -> None:
        """Raise ConfigError if vLLM is missing."""
        need_installed()

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> VllmEngine:
        """Return the engine on copies of the trainer's models."""
        need_installed()
        import torch

        from kapelle.engines.rollout.vllm.engine import VllmEngine
        from kapelle.engines.rollout.vllm.in_process import start_in_process

        return VllmEngine(
            models,
            policies,
            partial(start_in_process, self.kv_gib, self.max_rows, dict(self.options)),
            Path(tempfile.mkdtemp(prefix="kapelle-vllm-")),
            mixes=mixes_rightly(installed(), "cuda" if torch.cuda.is_available() else "cpu"),
            max_rows=self.max_rows,
            patience=self.patience,
        )
