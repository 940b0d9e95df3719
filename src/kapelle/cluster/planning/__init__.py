"""Estimate the memory of a run before anything is loaded, and suggest changes of settings if the memory is not sufficient.

    from kapelle.cluster.planning import plan
    found = plan("demo", "training.microbatch_tokens=8192", gpu_memory=80)
    found.fits, found.devices, found.advice

The module `planned_run.py` collects the quantities that determine the memory, and `workload.py` measures lengths of prompts by
running a few tasks with a mock engine. The other modules compute the number of bytes, with one term for each tensor in the code. The
formulae and their errors are described in docs/planning.md.
"""

from kapelle.cluster.planning.memory import Phase, Process
from kapelle.cluster.planning.plan import Advice, Plan, plan

__all__ = ["Advice", "Phase", "Plan", "Process", "plan"]
