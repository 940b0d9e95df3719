"""Estimate a run's memory before anything is loaded: by process and phase, whether it fits, and settings to change if it does not.

    from kapelle.cluster.planning import plan
    found = plan("demo", "training.microbatch_tokens=8192", gpu_memory=80)
    found.fits, found.devices, found.advice

`planned_run.py` collects the quantities, `workload.py` finds lengths by running a few tasks with a mock engine, and the other modules
compute bytes, term by term as in the code. docs/planning.md has the formulae and their errors.
"""

from kapelle.cluster.planning.memory import Phase, Process
from kapelle.cluster.planning.plan import Advice, Plan, plan

__all__ = ["Advice", "Phase", "Plan", "Process", "plan"]
