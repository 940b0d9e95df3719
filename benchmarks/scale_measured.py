"""Whether the simulator foretells runs of 1, 2 and 4 processes on this machine, from pieces measured in one.

    python -m benchmarks.scale_measured        # a few minutes

A chain of two agents on the 1M model learns by GRPO; answers end by chance, so that some processes wait for others. Pieces (a
token, a row, a trained token, an episode) are fitted to runs of other sizes. All times are CPU-seconds: between two meetings
of the processes the one that computed longest counts, in a meeting the one that waited least. So they are the seconds of a
machine with a core for each process, on any machine. `error` is predicted over measured, less one; its bar is 0.15.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.measure import single_thread
from benchmarks.scale_simulator import Costs, Plan, simulate

PROCESSES, STEPS = (1, 2, 4), 3
TASKS, SAMPLES, LONGEST, PROMPT = 16, 8, 64, 64
ENDS = "abcdefghijklmnop"
"""Letters that end an answer."""
SIZES = ((2, 64), (4, 64), (16, 64), (16, 8))
"""Tasks of a step, and the most tokens of an answer, of the runs that pieces are fitted to."""


def trainer(tasks: int, longest: int) -> Any:
    """Return a trainer of the run."""
    from benchmarks.subjects import FixedTasks, subject
    from kapelle.settings.schema import EvaluationConfig, TrainingConfig
    from kapelle.training.trainer import Trainer

    return Trainer(
        model=subject("1M"),
        team={"agents": 2, "sampling": {"max_tokens": longest, "stop": tuple(ENDS)}},
        environment=FixedTasks(prompt_tokens=PROMPT),
        workflow={"name": "chain"},
        algorithm={"name": "grpo", "group_size": SAMPLES},
        training=TrainingConfig(steps=1000, tasks_per_step=tasks),
        evaluation=EvaluationConfig(before_and_after=False),
    )


Row = tuple[list[float], float, float, float, float, tuple[int, int]]
"""Of a step: decode steps, answers' tokens, tokens read and episodes; seconds of sampling, of the update, of the rest and
of handing an episode over; tokens of answers and how many of these ended by themselves."""


def pieces_of_one() -> list[Row]:
    """Return what steps of other sizes took in one process."""
    from kapelle.runs.episode_json import dump_groups, load_groups

    rows: list[Row] = []
    for tasks, longest in SIZES:
        with trainer(tasks, longest) as made, _timed(made) as spent:
            for number in range(3):
                spent.update(played=0.0, updated=0.0)
                began = time.process_time()
                (step,) = made.steps(1)
                whole = time.process_time() - began
                episodes = [episode for group in step.groups for episode in group.episodes]
                answers = [len(turn.completion_ids) for e in episodes for turn in e.turns]
                latest = max(sum(len(turn.completion_ids) for turn in e.turns) for e in episodes)
                read = len(episodes) * 2 * PROMPT + sum(len(e.turns[0].completion_ids) for e in episodes)
                if number == 0:
                    continue
                work = [float(latest), float(sum(answers)), float(read), float(len(episodes))]
                rest = whole - spent["played"] - spent["updated"]
                began = time.process_time()
                load_groups(map(json.loads, dump_groups(0, step.groups).splitlines()))
                received = (time.process_time() - began) / len(episodes)
                said = (sum(answers), sum(n < longest for n in answers))
                rows.append((work, spent["played"], spent["updated"], rest, received, said))
    return rows


def fitted(rows: Sequence[Row]) -> tuple[Costs, float]:
    """Return the pieces' costs, and the mean tokens of an answer that is not cut."""
    import numpy as np

    table: Any = np.array([each[0] for each in rows])
    token, each_row, reading = _fitted(table[:, :3], [each[1] for each in rows])
    trained, step_cost = _fitted(
        np.stack([table[:, 1] + table[:, 2], np.ones(len(rows))], 1), [each[2] for each in rows]
    )
    episode, fixed = _fitted(np.stack([table[:, 3], np.ones(len(rows))], 1), [each[3] for each in rows])
    mean = sum(row[5][0] for row in rows) / sum(row[5][1] for row in rows)
    costs = Costs(
        token=token,
        row=each_row,
        read=reading,
        trained=trained,
        step=step_cost + fixed,
        episode=episode,
        received=statistics.median(row[4] for row in rows),
    )
    return costs, mean


def _fitted(features: Any, seconds: Sequence[float]) -> list[float]:
    """Return what each feature costs, not less than nothing, by least squares of relative errors."""
    import numpy as np

    target = np.array(seconds)
    scaled, left = features / target[:, None], list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, left], np.ones(len(target)), rcond=None)
        if (found >= 0).all():
            return [float(found[left.index(k)]) if k in left else 0.0 for k in range(features.shape[1])]
        left.pop(int(found.argmin()))


@contextmanager
def _timed(made: Any) -> Iterator[dict[str, float]]:
    """Count the CPU-seconds of sampling and of updates."""
    spent = {"played": 0.0, "updated": 0.0}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return call(*given, **named)
            finally:
                spent[name] += time.process_time() - began

        return counting

    made.loop.rollouts.collect = counted("played", made.loop.rollouts.collect)
    made.loop.engine.update = counted("updated", made.loop.engine.update)
    yield spent


def measured(processes: int) -> list[float]:
    """Return the seconds of every step of a run of so many processes."""
    ranks = _said(processes, "--rank")
    return [_critical([rank[step] for rank in ranks]) for step in range(STEPS)]


def meeting_cost() -> float:
    """Return the seconds of a meeting of two processes that have nothing to say."""
    return min(map(float, _said(2, "--meet")))


def _said(processes: int, role: str) -> list[Any]:
    """Start so many processes of this file in a role and return what each prints last."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), **place}
        given = {**os.environ, **(own if processes > 1 else {}), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.scale_measured", role]
        started.append(subprocess.Popen(command, env=given, stdout=subprocess.PIPE))  # noqa: S603 - this file
    said = [process.communicate()[0] for process in started]
    return [json.loads(each.splitlines()[-1]) for each in said]


def _critical(ranks: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Return the seconds of a step: of each piece of work the longest, of each meeting the shortest."""
    seconds = 0.0
    for pieces in zip(*ranks, strict=True):
        [kind] = {kind for kind, _ in pieces}
        seconds += (max if kind == "work" else min)(spent for _, spent in pieces)
    return seconds


def as_rank() -> None:
    """Take the steps of one process, and print the pieces of each."""
    from kapelle.runtime.rank_group import RankGroup

    single_thread()
    pieces: list[tuple[str, float]] = []
    last = time.process_time()

    def book(kind: str) -> None:
        nonlocal last
        now = time.process_time()
        pieces.append((kind, now - last))
        last = now

    all_gather, add = RankGroup.all_gather, RankGroup.add

    def meeting(self: RankGroup, at: str, work: Callable[[], bytes]) -> list[bytes]:
        def share() -> bytes:
            own = work()
            book("work")
            return own

        every = all_gather(self, at, share)
        book("meeting")
        return every

    def adding(self: RankGroup, tensors: Any) -> None:
        book("work")
        add(self, tensors)
        book("meeting")

    RankGroup.all_gather, RankGroup.add = meeting, adding  # type: ignore[method-assign]
    steps = []
    with trainer(TASKS, LONGEST) as made:
        for _ in made.steps(STEPS + 1):
            book("work")
            steps.append(list(pieces))
            pieces.clear()
    print(json.dumps(steps[1:]))


def as_meeting() -> None:
    """Meet another process a hundred times and print the seconds of one meeting."""
    from kapelle.runtime.rank_group import ranks_here

    single_thread()
    ranks = ranks_here(600.0)
    ranks.all_gather("begin", bytes)
    began = time.process_time()
    for _ in range(100):
        ranks.all_gather("meet", lambda: b"nothing")
    print((time.process_time() - began) / 100)


def run() -> dict[str, Any]:
    """Calibrate, predict and measure."""
    single_thread()
    before, meeting = pieces_of_one(), meeting_cost()
    found = {processes: statistics.median(measured(processes)) for processes in PROCESSES}
    costs, mean = fitted([*before, *pieces_of_one()])  # before and after: the load of the machine changes
    costs = replace(costs, meeting=meeting)
    plan = Plan(
        tasks=TASKS, samples=SAMPLES, agents=2, question=PROMPT, longest=LONGEST, mean=mean, processes=1
    )
    rows = {}
    for processes in PROCESSES:
        step = simulate(replace(plan, processes=processes), costs, steps=64)
        rows[str(processes)] = {
            "measured_s": found[processes],
            "predicted_s": step.seconds,
            "error": step.seconds / found[processes] - 1,
            "idle": step.idle,
        }
    pieces = {
        name: getattr(costs, name)
        for name in ("token", "row", "read", "trained", "step", "episode", "received", "meeting")
    }
    return {
        "processes": rows,
        "pieces_us": {k: 1e6 * v for k, v in pieces.items()},
        "mean_tokens": mean,
        "bar": 0.15,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        as_rank()
    elif sys.argv[1:] == ["--meet"]:
        as_meeting()
    else:
        print(json.dumps(run(), indent=2))
