"""A batch script for SLURM, to be submitted by `sbatch`."""

from __future__ import annotations

import shlex
from string import Template

from kapelle.cli.launch import Job

TEMPLATE = Template("""\
#!/bin/bash
# Trains with kapelle. Submit it with `sbatch THIS_FILE`, from the folder that its relative paths start from, which all
# nodes must see, as they must see the run directory, models and data. Submitted again, it continues the run.
#
# It was made from a template and has not been run. Add what your cluster wants here (partition, account, modules).
$options
set -euo pipefail

run_dir=$run_dir
resume=()
if [[ -e "$$run_dir/config.yaml" ]]; then
    resume=(--resume)
fi
$before
$start \\
    $words "$${resume[@]}"
""")

WARNING_S = 120
"""Seconds before the time limit at which the run is asked to save and stop."""


def script(job: Job) -> str:
    """Return the batch script of a job."""
    many = job.nodes * job.processes > 1
    before = ""
    if many:
        before = """
# The first node is where all others meet.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\\n'*}
port=$((20000 + SLURM_JOB_ID % 40000))
"""
    words = list(job.train)
    place = words.index("--run-dir")
    quoted = [shlex.quote(word) for word in words]
    quoted[place + 1] = '"$run_dir"'
    return TEMPLATE.substitute(
        options="\n".join(f"#SBATCH {option}" for option in _options(job)),
        run_dir=shlex.quote(job.run_dir),
        before=before,
        start=" \\\n    ".join(_start(job, many=many)),
        words=" ".join(quoted),
    )


def _options(job: Job) -> list[str]:
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if job.gpus:
        options.append(f"--gpus-per-node={job.gpus}")
    if job.cpus is not None:  # one task of the scheduler starts all processes of a node
        options.append(f"--cpus-per-task={job.cpus * job.processes}")
    if job.memory_gb is not None:
        options.append(f"--mem={job.memory_gb}G")
    if job.seconds is not None:
        minutes, seconds = divmod(job.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        options.append(f"--time={hours:02}:{minutes:02}:{seconds:02}")
        if job.seconds > 2 * WARNING_S:
            options.append(f"--signal=TERM@{WARNING_S}")
    return [*options, "--output=%x-%j.log", "--open-mode=append"]


def _start(job: Job, *, many: bool) -> list[str]:
    parts = ["srun --kill-on-bad-exit=1"]
    if job.image is not None:
        gpu = " --nv" if job.gpus else ""
        parts.append(f'apptainer exec{gpu} --bind "$PWD" {shlex.quote(job.image)}')
    if many:
        parts += [
            f'torchrun --nnodes {job.nodes} --nproc-per-node {job.processes} --rdzv-id "$SLURM_JOB_ID"',
            '--rdzv-backend c10d --rdzv-endpoint "$head:$port"',
            "-m kapelle train",
        ]
    else:
        parts.append("kapelle train")
    return parts
