"""Checks settings of a run that depend on each other, before a model is loaded."""

from __future__ import annotations

from kapelle import algorithm, workflow
from kapelle.engines.rollout import protocol as rollout_engine
from kapelle.engines.train import settings as train_engine
from kapelle.errors import ConfigError, KapelleError, raise_all
from kapelle.models import devices, outline
from kapelle.runs.trackers import check_trackers
from kapelle.settings import environments, schema
from kapelle.settings.checks import Check, RunToCheck
from kapelle.setup.environment_forms import check_workers
from kapelle.setup.feature import plans_of
from kapelle.setup.team_builder import check_pools

CHECKS: tuple[Check, ...] = (
    *rollout_engine.CHECKS,
    *train_engine.CHECKS,
    *environments.CHECKS,
    check_workers,
    *workflow.CHECKS,
    *schema.CHECKS,
    *devices.CHECKS,
    *outline.CHECKS,
)
"""The checks that apply to every run; each line contains the checks of one section."""
TRAINING_CHECKS: tuple[Check, ...] = (
    *schema.TRAINING_CHECKS,
    *devices.TRAINING_CHECKS,
    check_trackers,
    *algorithm.TRAINING_CHECKS,
    *train_engine.TRAINING_CHECKS,
    check_pools,
    *environments.TRAINING_CHECKS,
    *workflow.TRAINING_CHECKS,
)
"""The additional checks of a run that is trained, which are made before the checks of its features."""


def check_run(run: RunToCheck) -> None:
    """Raise one ConfigError with all errors in the settings of a run. The checks are fast, because no model is loaded."""
    faults: list[ConfigError] = []
    further = [*TRAINING_CHECKS, *(plan.check for plan in plans_of(run.config))] if run.training else []
    for check in (*CHECKS, *further):
        try:
            faults += map(ConfigError, check(run) or ())
        except ConfigError as fault:
            faults.append(fault)
            if check is environments.check_fit:  # later checks call the environment
                break
        except KapelleError:  # an error of a model or of rows; faults of settings are reported first
            raise_all(faults)
            raise
    raise_all(faults)
