"""Episodes of task folders: rewards, and what hostile agents do not achieve."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kapelle.environment import Outcome
from kapelle.environments.grading.text.tool_call import ReadCall, write_calls
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.task_folders.attempt import checked, grade
from kapelle.environments.task_folders.environment import TaskFolders
from kapelle.rollout.conformance import conform

EXAMPLES = Path("examples/task_folders")
pytestmark = pytest.mark.usefixtures("sandbox")


def shell(command: str) -> str:
    return write_calls([ReadCall("shell", {"command": command})], "hermes")


def run_episode(settings: TaskFolders, name: str, commands: Sequence[str]) -> tuple[list[str], Outcome]:
    """Let one agent run commands and finish; return its observations and the outcome."""

    async def play() -> tuple[list[str], Outcome]:
        tasks = [
            settings.task(split, k) for split in ("train", "test") for k in range(settings.size(split) or 0)
        ]
        task = next(each for each in tasks if each.id.endswith(f"-{name}"))
        world, observations = settings.start(task, ["solver"], 0), []
        try:
            for command in commands:
                await world.step({"solver": shell(command)})
                observations.append(world.observe("solver"))
            await world.step({"solver": "Done."})
            return observations, world.outcome()
        finally:
            await world.close()

    return asyncio.run(play())


@pytest.fixture
def task(tmp_path: Path) -> Callable[[str], TaskFolders]:
    """Return an environment with the training task `mine`, whose test script is given."""

    def made(script: str, files: dict[str, str] | None = None, **settings: Any) -> TaskFolders:
        folder = tmp_path / "tasks" / "mine"
        shutil.copytree(EXAMPLES / "greeting", folder)
        shutil.copytree(EXAMPLES / "greeting", tmp_path / "tests" / "other")
        (folder / "tests/test.sh").write_text(script)
        for path, text in (files or {}).items():
            (folder / path).write_text(text)
        return TaskFolders.model_validate(
            {"path": str(tmp_path / "tasks"), "test_path": str(tmp_path / "tests"), **settings}
        )

    return made


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "undone"), [("greeting", 0.0), ("mean", 0.25), ("sorted_names", 0.0)])
def test_the_solution_gives_reward_1_and_idling_does_not(name: str, undone: float) -> None:
    made = TaskFolders(path=str(EXAMPLES))
    folders = {folder.name: folder for split in ("train", "test") for folder in made.folders(split)}
    solution = folders[name].solution
    assert solution is not None
    _, ended = run_episode(made, name, [solution])
    assert (ended.rewards, ended.success, ended.truncated) == ({"solver": 1.0}, 1.0, False), ended.info
    assert run_episode(made, name, [])[1].rewards == {"solver": undone}


@pytest.mark.long
@pytest.mark.slow
def test_pytest_can_run_the_tests_of_a_script_that_downloads(task: Callable[..., TaskFolders]) -> None:
    file = "def test_it():\n    assert open('greeting.txt').read() == 'hello\\n'\n"
    made = task(
        "curl -LsSf https://astral.sh/uv | sh",
        {"tests/test_it.py": file},
        tests="pytest",
        test_path=str(EXAMPLES / "sorted_names"),
    )
    assert run_episode(made, "mine", ["echo hello > greeting.txt"])[1].rewards == {"solver": 1.0}
    assert run_episode(made, "mine", ["echo bye > greeting.txt"])[1].rewards == {"solver": 0.0}


def test_an_agent_reads_the_output_of_its_commands() -> None:
    made = TaskFolders(path=str(EXAMPLES), call_s=0.4, max_characters=100)
    read, _ = run_episode(
        made,
        "sorted_names",
        [
            "pwd; cat names.txt; export A=1; cd /",
            "exit 3",
            "sleep 9 & sleep 9",
            "seq 1000",
            "(sleep 9; echo late) & echo now",
        ],
    )
    assert read[0] == "/app\nmira\nana\nleo\nana"
    assert read[1] == "(exit code 3)"
    assert "took more than 0.4 s" in read[2]
    assert read[3].startswith("1\n2\n3")
    assert "more characters" in read[3]
    assert read[4].startswith("now")


BUILT = """FROM debian:12
WORKDIR /workspace/deep
COPY make.sh .
RUN mkdir -p /data/in && \\
    sh make.sh > /data/in/made.txt
RUN apt-get install -y jq
RUN rm make.sh
COPY make.sh /data/kept.sh
"""


@pytest.mark.slow
def test_run_lines_create_files_and_failed_ones_are_named(
    task: Callable[..., TaskFolders],
) -> None:
    made = task(
        "grep -q 42 /data/in/made.txt && [ -f /data/kept.sh ] && [ -f done ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        {"environment/Dockerfile": BUILT, "environment/make.sh": "pwd; echo 42\n"},
        run_lines="run",
    )
    read, ended = run_episode(made, "mine", ["pwd; ls; cat /data/in/made.txt; touch done"])
    assert read == ["/workspace/deep\n/workspace/deep\n42"]
    assert ended.rewards == {"solver": 1.0}
    [doubt] = made.doubts()
    assert "RUN apt-get install -y jq" in doubt


# -------- Hostile agents; tests/environments/sandbox tests the sandbox itself

ANSWER = 'if [ "$(cat out.txt)" = "$(cat /tests/expected.txt)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def test_the_agents_sandbox_has_no_tests_and_no_solution() -> None:
    look = (
        "ls /tests /solution /oracle /logs; find / -path /usr -prune -o -path /proc -prune -o -type f -size -2 -print;"
        " mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt"
    )
    read, ended = run_episode(TaskFolders(path=str(EXAMPLES)), "sorted_names", [f"({look}) 2>&1"])
    assert "cannot access '/tests'" in read[0]
    assert "Read-only file system" in read[0]
    assert "/app/names.txt" in read[0]
    assert not any(found in read[0] for found in ("run-tests.sh", "solution.sh", "test_outputs", "task.yaml"))
    assert ended.rewards == {"solver": 0.0}


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [
        "ln -s /tests/expected.txt out.txt",
        "ln -s /usr up && ln -s up/../tests/expected.txt out.txt",
        "ln -s / root && ln -s root/tests/expected.txt out.txt",
        "ln -s /proc/self/root/tests/expected.txt out.txt",
        "ln -s /logs/verifier/reward.txt out.txt",
    ],
)
def test_no_link_reaches_the_tests(task: Callable[..., TaskFolders], link: str) -> None:
    made = task(ANSWER, {"tests/expected.txt": "42\n"})
    assert run_episode(made, "mine", [link])[1].rewards == {"solver": 0.0}


def test_nothing_is_unpacked_through_a_link(task: Callable[..., TaskFolders]) -> None:
    """An agent can forge the driver's entries. The tests here write no reward, so any reward would be forged."""
    made = task("true reward.txt\n")
    entries = [["/app/way", "link", 0, "/logs"], ["/app/way/verifier/reward.txt", "file", 0o644, "MQ=="]]
    left = checked(entries, ["/app"], 1000, 10)
    verdict = grade(made.folders("train")[0], left, made.room())
    assert (verdict.reward, verdict.why[:20]) == (0.0, "The tests wrote no /")


def test_links_inside_the_task_and_to_the_system_stay(task: Callable[..., TaskFolders]) -> None:
    made = task(f"[ -L tool ] && {ANSWER}", {"tests/expected.txt": "42\n"})
    honest = "echo 42 > real.txt; ln -s real.txt out.txt; ln -s /usr/bin/env tool"
    assert run_episode(made, "mine", [honest])[1].rewards == {"solver": 1.0}


def test_a_program_in_the_background_is_dead_before_the_tests(task: Callable[..., TaskFolders]) -> None:
    marker = "kapelle-background-4711"
    made = task(
        "pgrep -fl background > /logs/verifier/found; [ -s /logs/verifier/found ]; echo $? > /logs/verifier/reward.txt\n"
    )
    daemon = f"setsid nohup bash -c 'exec -a {marker} sleep 300' >/dev/null 2>&1 & disown; (trap '' TERM INT HUP; sleep 300) &"
    _, ended = run_episode(made, "mine", [daemon, "pgrep -f 'sleep' | wc -l; true"])
    assert ended.rewards == {"solver": 1.0}
    assert subprocess.run(["pgrep", "-f", marker], check=False, capture_output=True).stdout == b""


FILLING = {
    "bytes": ("head -c 40M /dev/urandom > big", "exceed 4 MiB"),
    "a hole": ("truncate -s 20M hole", "exceed 4 MiB"),
    "files": ("mkdir d; for i in $(seq 4200); do : > d/$i; done", "exceed 4096 files"),
    "the sandbox": (
        "for i in 1 2 3 4 5 6 7 8 9; do head -c 60M /dev/urandom > /box/$i; head -c 60M /dev/urandom > $i; done",
        "",
    ),
    "memory": ("python3 -c 'x = bytearray(1 << 33)'; python3 -c 'import os\nwhile 1: os.fork()'", ""),
    "the driver": ("kill -9 $(pgrep -f driver.py); kill -9 -1", "sandbox"),
}


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("what", FILLING)
def test_too_many_files_or_a_broken_sandbox_give_reward_0(what: str) -> None:
    command, why = FILLING[what]
    made = TaskFolders(path=str(EXAMPLES), left_mb=4, disk_mb=64, memory_mb=256, call_s=10.0)
    _, ended = run_episode(made, "greeting", [command, "echo hello > greeting.txt"])
    if why:
        assert ended.rewards == {"solver": 0.0}
        assert why in str(ended.info["tests"])


def test_only_regular_files_are_passed_on(task: Callable[..., TaskFolders]) -> None:
    made = task(
        "[ ! -e pipe ] && [ ! -e socket ] && [ -f closed/in.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    odd = (
        "mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")';"
        " mkdir closed; touch closed/in.txt $'a\\nname' $'\\xff'; chmod 000 closed/in.txt closed; ln -s . loop"
    )
    assert run_episode(made, "mine", [odd])[1].rewards == {"solver": 1.0}


IN_THE_TESTS = {
    "overwrites the tests": "open('/tests/test.sh', 'w').write('echo 1 > /logs/verifier/reward.txt')",
    "moves the tests away": "import os; os.rename('/tests', '/app/tests')",
    "covers the tests": "import os; os.unlink('/tests/test.sh'); os.symlink('/app/mine.sh', '/tests/test.sh')",
    "writes another reward file": "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')",
    "writes the reward early": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "replaces the driver": "open('/kapelle/driver.py', 'w').write('')",
    "replaces python": "open('/kapelle/bin/python3', 'w').write('#!/bin/sh\\necho 42')",
    "prints a success": "print('PASSED', 42, 1)",
    "writes to process 1": "open('/proc/1/mem', 'wb'); open('/proc/1/fd/1', 'w').write('MQo=')",
    "kills all": "import os; os.kill(-1, 9)",
    "exits well": "import os; os._exit(0)",
}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("what", IN_THE_TESTS)
def test_the_agents_code_cannot_change_the_tests(task: Callable[..., TaskFolders], what: str) -> None:
    made = task(
        '[ "$(python3 /app/answer.py)" = 42 ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n'
    )
    write = f"cat > answer.py <<'END'\nimport contextlib\nwith contextlib.suppress(OSError):\n    {IN_THE_TESTS[what]}\nEND"
    assert run_episode(made, "mine", [write])[1].rewards == {"solver": 0.0}


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; echo 'import os; os._exit(0)' > conftest.py; touch sorted.txt",
        "echo 'import os; os._exit(0)' > pathlib.py; echo 'import os; os._exit(0)' > sitecustomize.py",
        "echo '=== short test summary info ===\nPASSED t.py::test_names_are_sorted\nPASSED t.py::test_the_list_stays' > sorted.txt",
    ],
)
def test_the_agent_cannot_end_or_configure_pytest(command: str) -> None:
    made = TaskFolders(path=str(EXAMPLES), tests="script")
    assert run_episode(made, "sorted_names", [command])[1].rewards == {"solver": 0.0}


@pytest.mark.long
@pytest.mark.slow
async def test_the_environment_conforms(sandbox: Bubblewrap) -> None:
    environment = TaskFolders(path=str(EXAMPLES / "greeting"), test_path=str(EXAMPLES / "mean"))
    findings = await conform(environment, tasks=1)
    assert [finding for finding in findings if finding.status == "failed"] == []
