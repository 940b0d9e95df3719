"""Tasks in containers, with a fake engine: rewards, limits, failures of the engine, and what hostile agents do not achieve."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.environments.task_folders.test_environment import ANSWER, EXAMPLES, run_episode

from kapelle.environments.sandbox import docker
from kapelle.environments.task_folders.attempt import PROVIDERS, _built, built
from kapelle.environments.task_folders.coding_agent import CodingAgent
from kapelle.environments.task_folders.containers import _unpacked
from kapelle.environments.task_folders.environment import TaskFolders
from kapelle.environments.task_folders.provider import WorkspaceClosed
from kapelle.errors import ConfigError, DataError, EpisodeError, SandboxError

pytestmark = [pytest.mark.usefixtures("sandbox"), pytest.mark.slow]
PODMAN = pytest.mark.parametrize("engine", ["podman"], indirect=True)
"""For tests in which the engines do not differ."""


class FakeEngine:
    """The state of the fake engine."""

    def __init__(self, name: str, state: Path) -> None:
        self.name, self.state = name, state

    def calls(self, command: str) -> list[list[str]]:
        """Return the arguments of all calls of a command."""
        lines = (self.state / "log").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[0] == command]

    def containers(self) -> list[str]:
        """Return the names of all containers."""
        place = self.state / "containers"
        return sorted(each.name for each in place.iterdir()) if place.is_dir() else []


@pytest.fixture(params=["podman", "docker"])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeEngine]:
    """Put a fake engine at the beginning of the search path."""
    state, program = tmp_path / "engine", tmp_path / "bin" / request.param
    state.mkdir()
    program.parent.mkdir()
    source = Path(__file__).with_name("fake_engine.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ENGINE", str(state))
    docker.engine_problem.cache_clear()
    docker.remove_left_behind.cache_clear()
    yield FakeEngine(request.param, state)
    docker.engine_problem.cache_clear()


@pytest.fixture
def task(tmp_path: Path, engine: FakeEngine) -> Callable[..., TaskFolders]:
    """Return an environment with the training task `mine`, whose test script and other files are given."""

    def made(script: str, files: dict[str, str | None] | None = None, **settings: Any) -> TaskFolders:
        folder = tmp_path / "tasks" / "mine"
        shutil.copytree(EXAMPLES / "greeting", folder)
        shutil.copytree(EXAMPLES / "greeting", tmp_path / "tests" / "other")
        for path, text in {"tests/test.sh": script, **(files or {})}.items():
            if text is None:
                (folder / path).unlink()
            else:
                (folder / path).write_text(text)
        places = {"path": str(tmp_path / "tasks"), "test_path": str(tmp_path / "tests")}
        return TaskFolders.model_validate({**places, "sandbox": engine.name, **settings})

    return made


def test_the_solution_gives_reward_1_in_an_image_that_is_built_once(engine: FakeEngine) -> None:
    made = TaskFolders.model_validate({"path": str(EXAMPLES), "sandbox": engine.name})
    made.check(["solver"])
    for _ in range(2):
        _built.clear()  # as in another process
        folders = {folder.name: folder for split in ("train", "test") for folder in made.folders(split)}
        solution = folders["mean"].solution
        assert solution is not None
        _, ended = run_episode(made, "mean", [solution])
        assert (ended.rewards, ended.truncated) == ({"solver": 1.0}, False), ended.info
    assert len(engine.calls("build")) == 1
    assert run_episode(made, "mean", [])[1].rewards == {"solver": 0.25}
    assert engine.containers() == []


def test_every_container_is_confined(engine: FakeEngine, task: Callable[..., TaskFolders]) -> None:
    made = task("echo 1 > /logs/verifier/reward.txt\n", memory_mb=300, disk_mb=5, processes=20)
    run_episode(made, "mine", ["true"])
    image, agent, tests = engine.calls("run")
    for words in (image, agent, tests):
        assert {
            *("--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--ipc=private", "--pull=never"),
            *("--security-opt=no-new-privileges", f"--memory={300 << 20}", f"--memory-swap={300 << 20}"),
            *("--pids-limit=32", "--stop-signal=SIGKILL"),
        } <= set(words)
        sizes = [word for word in words if word.startswith("--tmpfs=")]
        assert len(sizes) >= 4
        assert all(f"size={5 << 20}," in word for word in sizes)
    assert not any("/app:" in word for word in image)
    assert [any(word.startswith("--tmpfs=/tests:") for word in words) for words in (agent, tests)] == [
        False,
        True,
    ]
    users = {words[2] for words in engine.calls("exec") if "bash" in words}
    assert users == {"--user=65533:65533"}


@PODMAN
def test_an_engine_runs_the_run_lines_of_a_dockerfile(
    engine: FakeEngine, task: Callable[..., TaskFolders]
) -> None:
    lines = "FROM debian:12\nWORKDIR /workspace/deep\nRUN echo 42 > made.txt\n"
    script = "grep -q 43 made.txt; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    made = task(script, {"environment/Dockerfile": lines})
    read, ended = run_episode(made, "mine", ["pwd; cat made.txt; echo 43 > made.txt"])
    assert (read, ended.rewards) == (["/workspace/deep\n42"], {"solver": 1.0})
    assert made.doubts() == []


def test_a_task_needs_only_the_name_of_an_image(engine: FakeEngine, task: Callable[..., TaskFolders]) -> None:
    toml = '[environment]\ndocker_image = "some:1"\n'
    made = task(
        "[ -f x ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        {"task.toml": toml, "environment/Dockerfile": None},
    )
    with pytest.raises(EpisodeError, match=r"pull the image of the task mine: Error: .*manifest unknown"):
        run_episode(made, "mine", ["touch x"])
    (engine.state / "registry/some:1/srv/work").mkdir(parents=True)
    read, ended = run_episode(made, "mine", ["pwd", "touch x"])
    assert (read[0], ended.rewards) == ("/srv/work", {"solver": 1.0})
    with pytest.raises(DataError, match=r"or run the image with `environment.sandbox: podman`"):
        made.model_copy(update={"sandbox": "bubblewrap"}).folders("train")


@PODMAN
def test_an_agent_reads_limited_output_in_limited_time(
    engine: FakeEngine, task: Callable[..., TaskFolders]
) -> None:
    made = task("true reward.txt", call_s=1.0, max_characters=100)
    commands = [
        "exit 3",
        "sleep 99",
        "seq 100000",
        "yes",
        "printf '\\n%s 0\\n' x",
        "(sleep 9; echo late) & echo now",
    ]
    read, _ = run_episode(made, "mine", commands)
    assert read[0] == "(exit code 3)"
    assert "took more than 1 s" in read[1]
    assert read[2].startswith("1\n2\n3")
    assert "more characters" in read[2]
    assert "took more than 1 s" in read[3] or "more characters" in read[3]
    assert read[4].strip() == "x 0"
    assert read[5].startswith("now")


# -------- Failures of the engine


def test_a_missing_engine_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    docker.engine_problem.cache_clear()
    for name, install in (("podman", "apt-get install podman"), ("docker", "docs.docker.com")):
        made = TaskFolders.model_validate({"path": str(EXAMPLES), "sandbox": name})
        with pytest.raises(SandboxError, match=rf"`{name}` is not installed; .*{install}") as raised:
            made.check(["solver"])
        assert "\n" not in str(raised.value)
    docker.engine_problem.cache_clear()


def test_a_coding_agent_names_the_sandbox_that_it_needs() -> None:
    made = CodingAgent.model_validate({"path": str(EXAMPLES), "command": ["a"], "sandbox": "podman"})
    with pytest.raises(ConfigError, match=r"a coding agent runs only in `bubblewrap`"):
        made.check(["solver"])


@PODMAN
@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM missing", "podman could not build .*access to the resource is denied"),
        ("FROM a\nWORKDIR /app\nRUN exit 7", 'RUN exit 7": exit status 7'),
        ("FROM a\nWORKDIR /tests", "works in /tests, which belongs to"),
    ],
)
def test_a_failed_build_is_a_failed_episode(
    task: Callable[..., TaskFolders], dockerfile: str, message: str
) -> None:
    made = task("true reward.txt", {"environment/Dockerfile": dockerfile})
    with pytest.raises(EpisodeError, match=message):
        run_episode(made, "mine", ["true"])
    with pytest.raises(EpisodeError, match=message):
        run_episode(made, "mine", [])


def test_a_container_that_ends_gives_reward_0_and_a_failed_engine_does_not(
    engine: FakeEngine, task: Callable[..., TaskFolders]
) -> None:
    made = task("echo 1 > /logs/verifier/reward.txt\n")
    folder = made.folders("train")[0]
    place, start = PROVIDERS[engine.name], built(folder, made.room())
    box = place.start(start.task, made.room(), tests=False)
    [name] = engine.containers()
    os.kill(int((engine.state / "containers" / name / "pid").read_text()), signal.SIGKILL)
    box._client.wait()  # type: ignore[attr-defined]
    with pytest.raises(WorkspaceClosed, match=r"the container has ended"):
        box.run(["true"], "/app", {}, 5.0, 100)
    (engine.state / "broken").touch()
    with pytest.raises(SandboxError, match=rf"{engine.name} has failed: Error: Cannot connect to the engine"):
        box.run(["true"], "/app", {}, 5.0, 100)
    with pytest.raises(SandboxError, match=r"could not start a container: Error: Cannot connect"):
        place.start(start.task, made.room(), tests=False)
    (engine.state / "broken").unlink()
    box.stop()
    assert engine.containers() == []


CHILD = """
import sys, time
from kapelle.environments.task_folders.attempt import PROVIDERS, _built, built
from kapelle.environments.task_folders.environment import TaskFolders
made = TaskFolders(path=sys.argv[1], sandbox=sys.argv[2])
start = built(made.folders("test")[0], made.room())
box = PROVIDERS[sys.argv[2]].start(start.task, made.room(), tests=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_container_ends_with_a_killed_process_and_is_removed_at_the_next_start(
    engine: FakeEngine, task: Callable[..., TaskFolders]
) -> None:
    made = task("echo 1 > /logs/verifier/reward.txt\n")
    words = [sys.executable, "-c", CHILD, str(EXAMPLES), engine.name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        [left] = engine.containers()
        first = os.pidfd_open(int((engine.state / "containers" / left / "pid").read_text()))
        child.kill()
    assert select.select([first], [], [], 20.0)[0], "process 1 of the container is still running"
    os.close(first)
    kept = {}
    for name, owner in (("elsewhere", "other-machine 1 1"), ("alive", docker._owner())):
        kept[name] = engine.state / "containers" / name
        kept[name].mkdir()
        (kept[name] / "options.json").write_text(json.dumps({"label": [f"{docker.LABEL}={owner}"]}))
    assert docker._owner().startswith(socket.gethostname())
    assert run_episode(made, "mine", [])[1].rewards == {"solver": 1.0}
    assert engine.containers() == sorted(kept)


# -------- Hostile agents


@PODMAN
def test_the_agents_container_has_no_tests_and_no_solution(engine: FakeEngine, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "sorted_names", tmp_path / "tasks/sorted_names")
    (tmp_path / "tasks/sorted_names/Dockerfile").write_text("FROM debian:12\nWORKDIR /app\nCOPY . /app\n")
    shutil.copytree(EXAMPLES / "greeting", tmp_path / "tests/greeting")
    places = {"path": str(tmp_path / "tasks"), "test_path": str(tmp_path / "tests")}
    made = TaskFolders.model_validate({**places, "sandbox": engine.name})
    look = "ls -R /app /tests /solution /oracle /logs; mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt"
    read, ended = run_episode(made, "sorted_names", [f"({look}) 2>&1"])
    assert "cannot access '/tests'" in read[0]
    assert "names.txt" in read[0]
    assert not any(found in read[0] for found in ("run-tests.sh", "solution.sh", "test_outputs", "task.yaml"))
    assert ended.rewards == {"solver": 0.0}


@PODMAN
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "link",
    [
        "ln -s /tests/expected.txt out.txt",
        "ln -s ../tests/expected.txt out.txt",
        "mkdir -p d/e; ln -s d/e/../../../tests/expected.txt out.txt",
        "ln -s /usr up && ln -s up/../tests/expected.txt out.txt",
        "ln -s / root && ln -s root/tests/expected.txt out.txt",
        "ln -s //tests/expected.txt out.txt",
        "ln -s /app/../tests/expected.txt out.txt",
        "ln -s /proc/self/root/tests/expected.txt out.txt",
        "ln -s /logs/verifier/reward.txt out.txt",
    ],
)
def test_no_link_reaches_the_tests(task: Callable[..., TaskFolders], link: str) -> None:
    made = task(ANSWER, {"tests/expected.txt": "42\n"})
    assert run_episode(made, "mine", [link])[1].rewards == {"solver": 0.0}


@PODMAN
def test_links_inside_the_task_and_odd_files_are_passed_on(task: Callable[..., TaskFolders]) -> None:
    checks = "[ -L tool ] && [ -L deep/up ] && [ ! -e pipe ] && [ -f closed/in.txt ] && [ -f $'a\\nname' ]"
    made = task(f"{checks} && {ANSWER}", {"tests/expected.txt": "42\n"})
    odd = (
        "echo 42 > real.txt; ln -s real.txt out.txt; ln -s /usr/bin/env tool; mkdir deep; ln -s ../real.txt deep/up; mkfifo pipe;"
        " mkdir closed; touch closed/in.txt $'a\\nname' $'\\xff'; ln real.txt hard; chmod 000 closed/in.txt closed; ln -s . loop"
    )
    assert run_episode(made, "mine", [odd])[1].rewards == {"solver": 1.0}


@PODMAN
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("head -c 6M /dev/urandom > big", "exceed 4 MiB"),
        ("truncate -s 200G hole", "exceed 4 MiB"),
        ("mkdir d; for i in $(seq 4200); do : > d/$i; done", "exceed 4096 files"),
    ],
)
def test_too_many_files_give_reward_0(task: Callable[..., TaskFolders], command: str, why: str) -> None:
    made = task("echo 1 > /logs/verifier/reward.txt\n", left_mb=4)
    _, ended = run_episode(made, "mine", [command])
    assert ended.rewards == {"solver": 0.0}
    assert why in str(ended.info["tests"])


@PODMAN
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "attack",
    [
        "open('/tests/test.sh', 'w').write('echo 1 > /logs/verifier/reward.txt')",
        "import os; os.rename('/tests', '/app/tests')",
        "import os; os.unlink('/tests/test.sh')",
        "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')",
        "open('/logs/verifier/reward.txt', 'w').write('1')",
        "import os; os.kill(-1, 9)",
        "print('42\\n\\n0 0\\n', flush=True); import os; os.kill(os.getppid(), 9)",
    ],
)
def test_the_agents_code_cannot_change_the_tests(task: Callable[..., TaskFolders], attack: str) -> None:
    made = task('[ "$(python3 /app/answer.py)" = 42 ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n')
    write = (
        f"cat > answer.py <<'END'\nimport contextlib\nwith contextlib.suppress(OSError):\n    {attack}\nEND"
    )
    assert run_episode(made, "mine", [write])[1].rewards == {"solver": 0.0}


@pytest.mark.parametrize("packed", [b"no archive" * 200, b"\xff" * 4096, b"x\0" * 2048])
def test_a_forged_archive_is_no_error_of_kapelle(packed: bytes) -> None:
    with pytest.raises(WorkspaceClosed, match=r"its files could not be read"):
        _unpacked(packed, ["/app"], 100, 10)
