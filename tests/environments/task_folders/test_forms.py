"""Task folders as files: supported forms, and errors that name the line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kapelle.environments.task_folders.attempt import checked, read_reward
from kapelle.environments.task_folders.environment import TaskFolders
from kapelle.environments.task_folders.forms import read_task, summary_passed, task_folders
from kapelle.errors import ConfigError, DataError

EXAMPLES = Path("examples/task_folders")


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of an example with other files: `task("mean", **{"environment/Dockerfile": …})`."""

    def made(name: str, **files: str | None) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        for path, text in files.items():
            place = folder / path
            if text is None:
                place.unlink()
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
        return folder

    return made


def test_both_forms_are_read() -> None:
    harbor, terminal = (read_task(EXAMPLES / name, "script", "refuse") for name in ("mean", "sorted_names"))
    assert (harbor.form, harbor.workdir, harbor.script) == ("harbor", "/app", "/tests/test.sh")
    assert [(file.path, file.mode & 0o600) for file in harbor.files] == [("/app/statistics_of.py", 0o600)]
    assert (harbor.agent_s, harbor.tests_s, harbor.memory_mb) == (120.0, 60.0, 1024)
    assert (terminal.form, terminal.script) == ("terminal-bench", "/tests/run-tests.sh")
    assert terminal.instruction.startswith("names.txt has a name on each line.")
    assert terminal.expected == ("test_names_are_sorted", "test_the_list_stays")
    assert terminal.tests_env == {"TEST_DIR": "/tests"}
    assert terminal.solution == (EXAMPLES / "sorted_names/solution.sh").read_text()
    assert not any(b"sort -u" in file.content for file in terminal.files)


def test_a_dockerfile_copies_files_and_sets_variables(task: Callable[..., Path]) -> None:
    folder = task(
        "mean",
        **{
            "environment/Dockerfile": (
                "ARG WHERE=/srv/tool\nFROM a AS b\nCOPY gone.txt /gone/\nFROM python:3.11  # the last stage counts\n"
                'WORKDIR /workspace\nWORKDIR deep\nCOPY data/one.txt /workspace\nENV A=1 B="two words"\nENV OLD form of it\n'
                "COPY --chmod=755 data/one.txt \\\n    data/two.txt ./\nCOPY data /data\nCOPY *.py ${WHERE}/\n"
                'COPY ["data/one.txt", "/data/renamed.txt"]\nUSER nobody\nCMD ["sleep"]\n'
            ),
            "environment/gone.txt": "gone",
            "environment/data/one.txt": "1",
            "environment/data/two.txt": "2",
        },
    )
    read = read_task(folder, "script", "refuse")
    assert read.workdir == "/workspace/deep"
    assert {file.path: file.content for file in read.files} == {
        "/workspace/one.txt": b"1",
        "/workspace/deep/one.txt": b"1",
        "/workspace/deep/two.txt": b"2",
        "/data/one.txt": b"1",
        "/data/two.txt": b"2",
        "/data/renamed.txt": b"1",
        "/srv/tool/statistics_of.py": (EXAMPLES / "mean/environment/statistics_of.py").read_bytes(),
    }
    assert read.files[1].mode == 0o755
    assert read.folders == ("/app", "/data", "/srv", "/workspace"), "the instruction names /app"
    assert read.env == {"A": "1", "B": "two words", "OLD": "form of it"}


def dockerfile(*lines: str) -> dict[str, str | None]:
    return {"environment/Dockerfile": "\n".join(("FROM a", *lines, ""))}


UNSUPPORTED: list[tuple[str, dict[str, str | None], str]] = [
    ("mean", dockerfile("WORKDIR /app", "RUN apt-get install -y jq"), "line 3: RUN apt-get"),
    ("mean", dockerfile("COPY --from=b /x /app/x"), "--from=b"),
    ("mean", dockerfile("ADD https://x.org/y /app/"), "ADD"),
    ("mean", dockerfile("COPY nothing /app/"), "no nothing"),
    ("mean", dockerfile("COPY ../tests /app/"), r"no \.\./tests"),
    ("mean", dockerfile("COPY statistics_of.py /usr/lib/"), "to /usr/lib"),
    ("mean", dockerfile("WORKDIR /tests"), "to /tests"),
    ("mean", dockerfile("COPY statistics_of.py /"), "to /statistics_of.py"),
    ("mean", {"environment/Dockerfile": None}, "Dockerfile is missing"),
    ("mean", {"environment/docker-compose.yaml": "services: {}"}, "services"),
    ("mean", {"task.toml": "[[steps]]\nname = 'a'\n"}, "steps"),
    ("mean", {"task.toml": "[environment]\ngpus = 1\n"}, "gpus"),
    ("mean", {"task.toml": "[verifier.env]\nKEY = '${OPENAI_API_KEY}'\n"}, "OPENAI_API_KEY"),
    ("mean", {"task.toml": "[verifier"}, "TOML"),
    ("mean", {"task.toml": "[agent]\ntimeout_sec = -1\n"}, "timeout_sec"),
    ("mean", {"tests/test.sh": "# curl https://a\ncurl -LsSf https://a.sh | sh\n"}, "line 2"),
    ("mean", {"tests/test.sh": "uvx -w pytest pytest /tests\n"}, "line 1"),
    ("sorted_names", {"task.yaml": "difficulty: easy\n"}, "instruction"),
    ("sorted_names", {"task.yaml": "instruction: x\nparser_name: swelancer\n"}, "swelancer"),
    ("sorted_names", {"task.yaml": "instruction: x\nrun_tests_in_same_shell: true\n"}, "same_shell"),
    ("sorted_names", {"docker-compose.yaml": "services: {client: {}, db: {}}"}, "services client, db"),
    ("sorted_names", {"Dockerfile": "FROM a\nCOPY solution.sh /app/\n"}, "solution.sh"),
    ("sorted_names", {"Dockerfile": "FROM a\nCOPY tests/ /app/\n"}, "tests/"),
]


@pytest.mark.parametrize(("name", "files", "why"), UNSUPPORTED)
def test_an_unsupported_task_is_rejected_with_its_line(
    task: Callable[..., Path], name: str, files: dict[str, str | None], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        read_task(task(name, **files), "script", "refuse")


def test_a_whole_folder_is_copied_without_tests_and_solution(task: Callable[..., Path]) -> None:
    read = read_task(task("sorted_names", Dockerfile="FROM a\nWORKDIR /app\nCOPY . .\n"), "script", "refuse")
    assert [file.path for file in read.files] == ["/app/names.txt"]


def test_skipped_run_lines_are_named(task: Callable[..., Path]) -> None:
    folder = task("mean", **dockerfile("RUN apt-get update && \\\n  apt-get install jq", "WORKDIR /app"))
    assert read_task(folder, "script", "skip").without == ("RUN apt-get update &&    apt-get install jq",)


def test_folders_of_the_instruction_exist(task: Callable[..., Path]) -> None:
    text = "Read `/data/logs/` and write /output/a.csv, not /usr/x, ~/y/, and/or/ https://x.org/a/b."
    read = read_task(task("mean", **{"instruction.md": text}), "script", "refuse")
    assert read.folders == ("/app", "/data", "/output")


def test_here_documents_are_no_instructions(task: Callable[..., Path]) -> None:
    lines = "FROM a\nRUN <<EOF\nCOPY nothing /app/\nEOF\nWORKDIR /app\n"
    read = read_task(task("mean", **{"environment/Dockerfile": lines}), "script", "skip")
    assert (read.workdir, read.files, read.without) == ("/app", (), ("RUN <<EOF",))


def test_training_on_a_benchmark_is_reported(task: Callable[..., Path]) -> None:
    folder = task("mean", **{"instruction.md": "# terminal-bench-canary GUID 0\nFix it."})
    greeting = str(EXAMPLES / "greeting")
    [doubt] = TaskFolders(path=str(folder), test_path=greeting).doubts()
    assert "benchmark" in doubt
    assert "(mean)" in doubt
    assert TaskFolders(path=greeting, test_path=str(folder)).doubts() == []


def test_links_out_of_a_task_are_not_followed(task: Callable[..., Path]) -> None:
    folder = task("mean")
    (folder / "environment/secret").symlink_to("/etc/hostname")
    (folder / "environment/Dockerfile").write_text("FROM a\nWORKDIR /app\nCOPY . .\n")
    with pytest.raises(DataError, match="links"):
        read_task(folder, "script", "refuse")


def test_splits_are_disjoint_and_a_single_task_needs_another_folder() -> None:
    both = TaskFolders(path=str(EXAMPLES))
    assert {both.task("train", k).question for k in range(2)}.isdisjoint({both.task("test", 0).question})
    assert (both.size("train"), both.size("test")) == (2, 1)
    with pytest.raises(ConfigError, match="test_path"):
        TaskFolders(path=str(EXAMPLES / "mean")).check(["solver"])
    with pytest.raises(DataError, match="no task folder"):
        task_folders("tests/environments")


def test_an_unsupported_task_stops_the_run_or_is_excluded(tmp_path: Path) -> None:
    for name in ("mean", "greeting"):
        shutil.copytree(EXAMPLES / name, tmp_path / "tasks" / name)
    (tmp_path / "tasks/mean/environment/Dockerfile").write_text("FROM a\nRUN make\n")
    settings = {"path": str(tmp_path / "tasks"), "test_path": str(EXAMPLES / "sorted_names")}
    with pytest.raises(DataError, match="RUN make"):
        TaskFolders.model_validate(settings).size("train")
    without = TaskFolders.model_validate({**settings, "unplayable": "leave_out"})
    assert [folder.name for folder in without.folders("train")] == ["greeting"]
    assert list(without.skipped()) == ["train"]
    assert without.skipped()["train"].startswith("1 task folders; the first: ")


SUMMARY = "PASSED in the head of it\n=== short test summary info ===\n"


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (f"{SUMMARY}PASSED t.py::test_a\nPASSED t.py::TestB::test_b[1-x]\n", 1.0),
        (f"{SUMMARY}PASSED t.py::test_a\nXFAIL t.py::test_b - later\n", 1.0),
        (f"{SUMMARY}PASSED t.py::test_a\nSKIPPED [1] t.py:3: not here\n", 1.0),
        (f"{SUMMARY}PASSED t.py::test_a\n", 0.0),
        (f"{SUMMARY}PASSED t.py::test_a\nFAILED t.py::test_b - AssertionError\n", 0.0),
        (f"{SUMMARY}PASSED t.py::test_a\nPASSED t.py::test_b\nERROR t.py::test_c\n", 0.0),
        (f"{SUMMARY}SKIPPED [2] t.py:3: not here\n", 0.0),
        ("PASSED t.py::test_a\nPASSED t.py::test_b\n", 0.0),
        ("", 0.0),
    ],
)
def test_a_summary_with_every_test_and_no_failure_gives_reward_1(output: str, reward: float) -> None:
    assert summary_passed(output, ["test_a", "test_b"])[0] == reward


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " 0.25", 0.25),
        ("reward.txt", "nan", None),
        ("reward.txt", "inf", None),
        ("reward.txt", "one", None),
        ("reward.txt", "1" * 100, None),
        ("reward.json", '{"reward": 0.5, "style": 1, "note": "x", "ok": true}', 0.5),
        ("reward.json", '{"accuracy": 0.75}', 0.75),
        ("reward.json", '{"a": 1, "b": 0}', None),
        ("reward.json", '{"reward": NaN}', None),
        ("reward.json", '{"reward": 1e999}', None),
        ("reward.json", "[1]", None),
        ("reward.json", "[" * 100_000, None),
    ],
)
def test_a_reward_file_holds_a_finite_number(name: str, text: str, reward: float | None) -> None:
    found = read_reward(name, text)
    assert (None if isinstance(found, str) else found["reward"]) == reward


@pytest.mark.parametrize(
    "entry",
    [
        ["/tests/test.sh", "file", 0o644, ""],
        ["/app/../tests/test.sh", "file", 0o644, ""],
        ["/app//x", "file", 0o644, ""],
        ["/app", "link", 0, "/tests"],
        ["/app/x\0", "file", 0o644, ""],
        ["/app/x", "device", 0o644, ""],
        ["/app/x", "file", True, ""],
        ["/app/x", "file", 0o644, "no base64!"],
        ["/app/x", "file", 0o644, "QUFB" * 100],
        ["/app/x", "file"],
        "/app/x",
    ],
)
def test_entries_are_checked(entry: object) -> None:
    with pytest.raises(ValueError, match=r"entry|bytes|base64"):
        checked([entry], ["/app"], 200, 10)
    assert checked([["/app/x", "file", 0o4755, "QUFB"]], ["/app"], 200, 10) == [
        ["/app/x", "file", 0o755, "QUFB"]
    ]
