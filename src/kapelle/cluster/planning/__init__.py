"""What a run will need, before anything is loaded: memory by process and phase, what fits, and what to change where it does not.

    from kapelle.cluster.planning import plan
    found = plan("demo", "training.microbatch_tokens=8192", gpu_memory=80)
    found.fits, found.devices, found.advice

`planned_run.py` gathers what memory depends on, `workload.py` plays a few tasks with a stand-in for their lengths, and the
others turn both into bytes, each term as the code keeps it. docs/planning.md has the formulae and how far they were off.
"""

from kapelle.cluster.planning.memory import Phase, Process
from kapelle.cluster.planning.plan import Advice, Plan, plan

__all__ = ["Advice", "Phase", "Plan", "Process", "plan"]
