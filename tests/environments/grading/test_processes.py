from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses, ProcessFailed, TooCostly

WORKER = "tests.environments.grading.misbehaving_worker"


def pool(**limits: float) -> KillableProcesses:
    return KillableProcesses(
        WORKER, 1, AnswerLimits(**{"cpu_s": 0.3, "wall_s": 10.0, **limits}, memory_bytes=1 << 29)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"do": "loop"}, "more than 0.3 s of CPU"),
        ({"do": "ignore signals"}, "more than 0.3 s of CPU"),
        ({"do": "power"}, "more than 0.3 s of CPU"),
        ({"do": "half a line"}, "died"),
        ({"do": "exit"}, "died"),
        ({"do": "memory"}, "memory"),
        ({"do": "recursion"}, "nested too deeply"),
        ({"do": "raise"}, "ZeroDivisionError"),
        ({"do": "shell"}, "PermissionError"),
        ({"do": "fork"}, "PermissionError"),
        ({"do": "write"}, "OSError|died"),
    ],
)
def test_work_that_fails_gives_up_and_the_next_is_answered(
    question: dict[str, str], reason: str, tmp_path: Path
) -> None:
    with pool() as processes:
        processes.warm()
        start = time.monotonic()
        with pytest.raises(ProcessFailed, match=reason):
            processes.ask({**question, "folder": str(tmp_path)})
        assert time.monotonic() - start < 20.0
        assert all(path.stat().st_size == 0 for path in tmp_path.iterdir())
        assert processes.ask({"do": "echo", "value": "still here"}) == "still here"


@pytest.mark.parametrize(
    ("do", "its_own_fault"),
    [
        ("loop", True),
        ("memory", True),
        ("recursion", True),
        ("raise", True),
        ("crash", True),
        ("exit", False),
    ],
)
def test_whose_fault_it_is_that_there_is_no_answer(do: str, its_own_fault: bool) -> None:
    with pool(cpu_s=0.1) as processes, pytest.raises(ProcessFailed) as gave_up:
        processes.ask({"do": do})
    assert isinstance(gave_up.value, TooCostly) is its_own_fault


def test_work_that_waits_is_ended_by_the_clock() -> None:
    with pool(wall_s=0.2) as processes, pytest.raises(ProcessFailed, match=r"longer than 0.2 s\."):
        processes.ask({"do": "wait"})


def test_who_computed_all_the_while_is_not_at_fault_that_the_clock_ran_out() -> None:
    with (
        pool(cpu_s=30.0, wall_s=1.0) as processes,
        pytest.raises(ProcessFailed, match=r"longer than 1 s\.") as gave_up,
    ):
        processes.ask({"do": "loop"})
    assert not isinstance(gave_up.value, TooCostly)


def test_a_server_that_dies_is_replaced() -> None:
    with pool(cpu_s=10) as processes:
        processes.warm()
        [server] = processes._running
        server.kill()
        server.wait()
        assert processes.ask({"do": "echo", "value": 1}) == 1


def test_many_threads_share_a_pool_and_get_their_own_answers() -> None:
    before = threading.active_count()
    with pool(cpu_s=10) as processes, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda k: processes.ask({"do": "echo", "value": k}), range(40)))
    assert answers == list(range(40))
    assert threading.active_count() <= before


def test_a_child_remembers_nothing_of_the_last_question() -> None:
    with pool(cpu_s=10) as processes:
        assert [processes.ask({"do": "count"}) for _ in range(3)] == [1, 1, 1]


def test_a_closed_pool_leaves_no_process_and_can_restart() -> None:
    processes = pool(cpu_s=10)
    processes.warm()
    [server] = processes._running
    processes.close()
    assert server.returncode is not None
    assert processes.ask({"do": "echo", "value": 2}) == 2
    processes.close()
