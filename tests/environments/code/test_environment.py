from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.environments.grading.code.cheats import CHEATS
from tests.support.programs import output_of, ticking
from tests.workflows.stage import expert, lines, play

from kapelle.environment import Scorable
from kapelle.environments.code import MBPP_SPLITS, Code
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Layer
from kapelle.environments.sandbox.unsafe_subprocess import UnsafeSandboxWarning
from kapelle.errors import DataError, EpisodeError, SandboxError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Task
from kapelle.workflows.parallel import Parallel
from kapelle.workflows.solo import Solo

DOUBLE: dict[str, Any] = {
    "task_id": 1,
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n\treturn 2 * x",
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(3) == 6", "assert double(-7) == -14"],
    "challenge_test_list": [],
}
OTHER = {**DOUBLE, "task_id": 2, "text": "Double."}
HALVE: dict[str, Any] = {
    "task_id": "Halve/0",
    "prompt": 'import math\n\n\ndef halve(x):\n    """Return half of x, rounded down."""\n',
    "canonical_solution": "    return math.floor(x / 2)\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(7) == 3\n",
    "entry_point": "halve",
}
SUM: dict[str, Any] = {
    "question": "Read two numbers on a line and print their sum.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["20 22\n", "-1 1\n"], "output": ["42\n", "0\n"]},
    "solution": "a, b = map(int, input().split())\nprint(a + b)",
}


def folder(path: Path, row: dict[str, Any], other: dict[str, Any]) -> str:
    for name, each in (("train", row), ("test", other)):
        (path / f"{name}.jsonl").write_text(json.dumps(each) + "\n")
    return str(path)


@pytest.fixture
def mbpp(sandbox: Bubblewrap, tmp_path: Path) -> str:
    return folder(tmp_path, DOUBLE, OTHER)


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```"


WRONG = fenced("def double(x):\n    return x * x")
AGAIN = "Answer with the whole program again, in one block that opens with ```python and closes with ```."
NOT_ALL = "Tests that are not shown to you: not all passed."
RIGHT = fenced("def double(x):\n    return x + x")


async def test_a_second_program_follows_the_report_of_the_shown_test(mbpp: str) -> None:
    environment = Code(path=mbpp, max_attempts=3)
    says = lines("I do not know.\n```\n", fenced("def double(x):\n    return x * 3"), RIGHT, "unused")
    [episode] = await play(environment, Parallel(), ["coder"], {"coder": says}, environment.task("train", 0))
    shown = "assert double(2) == 4"
    assert [turn.new_messages[0].content for turn in episode.turns] == [
        f"Write a function to double a number.\n\nYour code must pass this test:\n{shown}",
        f"Attempt 1 of 3 failed. No program was found. {AGAIN}",
        f"Attempt 2 of 3 failed.\n\n{shown}\n# failed: the assertion does not hold\n\n{NOT_ALL}\n\n{AGAIN}",
    ]
    assert episode.rewards == {"coder": 1.0}
    assert episode.success == 1.0
    assert episode.info["attempts"] == {"coder": 3}
    assert not episode.truncated


async def test_the_last_program_counts(mbpp: str) -> None:
    environment = Code(path=mbpp, max_attempts=2, partial_credit=True)
    says = lines(fenced("def double(x):\n    return 4 if x == 2 else 6"), WRONG)
    [episode] = await play(environment, Parallel(), ["coder"], {"coder": says}, environment.task("train", 0))
    assert len(episode.turns) == 2
    assert episode.rewards == {"coder": pytest.approx(1 / 3)}
    assert episode.info["tests"] == {"coder": ["passed", "failed", "failed"]}
    assert episode.info["explanations"]["coder"].startswith("Attempt 2 of 2 failed.")


async def test_agents_work_in_parallel_and_stop_after_a_correct_program(mbpp: str) -> None:
    environment = Code(path=mbpp, max_attempts=2)
    scripts = {"quick": lines(RIGHT, "unused"), "slow": lines(WRONG, WRONG)}
    [episode] = await play(environment, Parallel(), ["quick", "slow"], scripts, environment.task("train", 0))
    assert [turn.agent for turn in episode.turns] == ["quick", "slow", "slow"]
    assert episode.rewards == {"quick": 1.0, "slow": 0.0}
    assert episode.success == 0.5


@pytest.mark.parametrize("partial_credit", [False, True])
async def test_a_workflow_with_one_answer_takes_one_program(mbpp: str, partial_credit: bool) -> None:
    environment = Code(path=mbpp, max_attempts=3, partial_credit=partial_credit)
    [episode] = await play(
        environment, Solo(), ["coder"], {"coder": lines(WRONG)}, environment.task("train", 0)
    )
    assert len(episode.turns) == 1
    assert episode.success == (pytest.approx(1 / 3) if partial_credit else 0.0)


async def test_agents_learn_nothing_of_a_hidden_test(mbpp: str) -> None:
    # The program prints and raises its argument.
    spy = "def double(x):\n    print('called', x)\n    raise ValueError(f'called with {x!r}')"
    environment = Code(path=mbpp, max_attempts=2)
    says = lines(fenced(spy), fenced(spy))
    [episode] = await play(environment, Parallel(), ["coder"], {"coder": says}, environment.task("train", 0))
    prompts = "\n".join(message.content for turn in episode.turns for message in turn.new_messages)
    assert "called with 2" in prompts, "the shown test reports the error"
    for hidden in ("-7", "14", "double(3)", "called with 3", "6"):
        assert hidden not in prompts
    assert environment.task("train", 0) == Task("train-0", episode.turns[0].new_messages[0].content)


@pytest.mark.slow
@pytest.mark.parametrize("what", CHEATS)
@pytest.mark.parametrize("form", ["mbpp", "humaneval", "stdio"])
async def test_cheats_receive_no_reward(sandbox: Bubblewrap, tmp_path: Path, form: Any, what: str) -> None:
    row, name = {"mbpp": (DOUBLE, "double"), "humaneval": (HALVE, "halve"), "stdio": (SUM, "main")}[form]
    other = {**row, "task_id": "other", "question": "other"}
    environment = Code(path=folder(tmp_path, row, other), format=form, partial_credit=True)
    cheat = fenced(CHEATS[what].replace("{name}", name))
    scripts = {"cheat": lines(cheat), "expert": expert(environment)}
    task, tries = environment.task("train", 0), 3
    [episode] = await play(environment, Parallel(), [*scripts], scripts, task)
    while "SandboxError" in (episode.error or "") and (tries := tries - 1):
        # That a busy machine could not start or measure a sandbox says nothing of the cheat.
        [episode] = await play(environment, Parallel(), [*scripts], scripts, task)
    assert episode.error is None
    assert episode.rewards == {"cheat": 0.0, "expert": 1.0}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("```python\n    return x // 2\n```", 1.0),
        ("```python\ndef halve(x):\n    return math.floor(x / 2)\n```", 1.0),
        ("```python\ndef half(x):\n    return x // 2\n```", 0.0),
        ("    return x // 2", 1.0),
        ("    return x / 2", 0.0),
    ],
)
async def test_a_function_of_humaneval_is_continued_or_defined(
    sandbox: Bubblewrap, tmp_path: Path, text: str, score: float
) -> None:
    bare = {**HALVE, "prompt": HALVE["prompt"].rstrip(), "task_id": "Halve/1"}
    environment = Code(path=folder(tmp_path, HALVE, bare), format="humaneval")
    scripts = {"coder": lines(text)}
    [unended] = await play(environment, Solo(), ["coder"], scripts, environment.task("test", 0))
    assert unended.rewards == {"coder": score}
    [episode] = await play(
        environment, Solo(), ["coder"], {"coder": lines(text)}, environment.task("train", 0)
    )
    assert episode.rewards == {"coder": score}
    assert episode.turns[0].new_messages[0].content == HALVE["prompt"]


async def test_a_program_that_reads_and_prints(sandbox: Bubblewrap, tmp_path: Path) -> None:
    environment = Code(path=folder(tmp_path, SUM, {**SUM, "question": "q"}), format="stdio", max_attempts=2)
    says = lines(fenced("print(3)\nprint(sum(map(int, input().split())))"), fenced(SUM["solution"]))
    [episode] = await play(environment, Parallel(), ["coder"], {"coder": says}, environment.task("train", 0))
    shown = "Input:\n1 2\nOutput:\n3"
    assert [turn.new_messages[0].content for turn in episode.turns] == [
        f"Read two numbers on a line and print their sum.\n\n{shown}",
        f"Attempt 1 of 2 failed.\n\n{shown}\n# failed: the program printed '3\\n3'\n\n{NOT_ALL}\n\n{AGAIN}",
    ]
    assert episode.rewards == {"coder": 1.0}


@pytest.mark.parametrize(
    "tests",
    [
        {"input_output": '{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}'},
        {"private_tests": [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}]},
    ],
)
async def test_other_forms_of_tests_are_private(
    sandbox: Bubblewrap, tmp_path: Path, tests: dict[str, Any]
) -> None:
    row = {"problem": "Add.", "solutions": [SUM["solution"]], **tests}
    path = folder(tmp_path, row, {**row, "problem": "other"})
    environment = Code(path=path, format="stdio", question_field="problem", partial_credit=True)
    task = environment.task("train", 0)
    assert task.question == "Add."
    scripts = {"a": expert(environment), "b": lines(fenced("print(3)"))}
    [episode] = await play(environment, Parallel(), ["a", "b"], scripts, task)
    assert episode.rewards == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("mbpp", {"task_id": 1, "text": "t"}, "line 1: .*MBPP"),
        ("humaneval", {"task_id": 1}, "line 1: .*HumanEval"),
        ("stdio", {"question": "q"}, "line 1 .*public_tests"),
        ("stdio", {"question": "q", "input_output": "{"}, "line 1: `input_output`"),
        (
            "stdio",
            {"question": "q", "private_tests": {"input": ["1"], "output": []}},
            "equally many `input`",
        ),
        (
            "stdio",
            {"question": "q", "private_tests": {"input": [1], "output": ["1"]}},
            "equally many `input`",
        ),
        ("stdio", {"question": "q", "input_output": {"fn_name": "f", "inputs": []}}, "'f'"),
    ],
)
def test_a_row_of_another_form_is_an_error(
    tmp_path: Path, form: Any, row: dict[str, Any], message: str
) -> None:
    environment = Code(path=folder(tmp_path, row, {**SUM, **OTHER, "question": "r"}), format=form)
    with pytest.raises(DataError, match=message):
        environment.check(["coder"])


def test_without_the_sandbox_nothing_starts(mbpp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Layer("network namespace", required=True, present=False, detail="closed on this machine.")
    monkeypatch.setattr(Bubblewrap, "layers", lambda self: (missing,))
    with pytest.raises(SandboxError, match="network namespace"):
        Code(path=mbpp).check(["coder"])


async def test_an_unsafe_sandbox_warns_in_every_run(mbpp: str) -> None:
    environment = Code(path=mbpp, sandbox="unsafe_subprocess")
    scripts = {"coder": lines(RIGHT)}
    with pytest.warns(UnsafeSandboxWarning, match="nothing"):
        [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
    assert episode.rewards == {"coder": 1.0}


async def test_impossible_steps_are_errors(mbpp: str) -> None:
    environment = Code(path=mbpp)
    world = environment.start(environment.task("train", 0), ["coder"], 0)
    with pytest.raises(EpisodeError, match="acted"):
        await world.step({})
    with pytest.raises(EpisodeError, match="Did you mean 'coder'"):
        await world.step({"codr": RIGHT})
    assert world.outcome().truncated
    await world.step({"coder": WRONG})
    assert world.movers() == ()
    with pytest.raises(EpisodeError, match="no attempts left"):
        await world.step({"coder": RIGHT})


async def test_a_program_can_be_scored_without_counting(mbpp: str) -> None:
    environment = Code(path=mbpp, partial_credit=True)
    world = environment.start(environment.task("train", 0), ["coder"], 0)
    assert isinstance(world, Scorable)
    assert [await world.score("coder", text) for text in (RIGHT, WRONG)] == [1.0, pytest.approx(1 / 3)]
    assert world.movers() == ("coder",)


async def test_tests_that_cannot_be_run_fail_the_episode(sandbox: Bubblewrap, tmp_path: Path) -> None:
    broken = {**HALVE, "test": "def check(candidate) assert"}
    environment = Code(path=folder(tmp_path, broken, {**HALVE, "task_id": "o"}), format="humaneval")
    scripts = {"coder": lines("    return 1")}
    [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
    assert episode.error is not None
    assert "The tests could not be run" in episode.error
    assert episode.rewards == {}


async def test_programs_do_not_block_the_event_loop(mbpp: str) -> None:
    environment = Code(path=mbpp)
    async with ticking(at_least=100):
        await play(environment, Solo(), ["coder"], {"coder": lines(RIGHT)}, environment.task("train", 0))


def test_the_sandboxes_end_with_their_process(mbpp: str) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from kapelle.environments.code import Code\n"
        "async def main():\n"
        f"    environment = Code(path={mbpp!r})\n"
        "    world = environment.start(environment.task('train', 0), ['coder'], 0)\n"
        "    await world.step({'coder': 'def double(x): return 2 * x'})\n"
        "    assert world.outcome().success == 1.0\n"
        "    from kapelle.environments.sandbox.pool import shared_pool\n"
        "    pool = shared_pool(environment.sandbox, environment.limits, environment.parallel)\n"
        "    assert pool.wait_until_warm()\n"
        "asyncio.run(main())\n"
        "print(*open(f'/proc/self/task/{os.getpid()}/children').read().split())\n"
        "for task in os.listdir('/proc/self/task'):\n"
        "    print(open(f'/proc/self/task/{task}/children').read())\n"
    )
    children = {int(number) for number in output_of(program).split()}
    assert children, "sandboxes waited when the program ended"
    for number in children:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def mbpp_file(data_folder: Path) -> str:
    return str(data_folder / "mbpp" / "mbpp.jsonl.gz")


async def scripted(environment: Code, tasks: list[Task]) -> dict[str, float | None]:
    """Return the score of every task's scripted solution, None for an error."""
    from tests.workflows.stage import team_of

    from kapelle.engines.rollout.scripted import ScriptedEngine

    stage = RolloutSetup(
        team_of("coder"), environment, Solo(), ScriptedEngine({"coder": expert(environment)})
    )
    return {group.task.id: group.episodes[0].success for group in await rollout(stage, tasks, 1, 0)}


@pytest.mark.data
async def test_published_splits_of_mbpp(
    sandbox: Bubblewrap, data_folder: Path, mbpp_rows: list[dict[str, Any]]
) -> None:
    environment = Code(path=mbpp_file(data_folder))
    environment.check(["coder"])
    assert {split: environment.size(split) for split in MBPP_SPLITS} == {"train": 374, "test": 500}
    assert environment.task("train", 0).question.startswith(mbpp_rows[600]["text"])
    assert environment.task("test", 0).question.startswith(mbpp_rows[10]["text"])
    sample = [environment.task("test", index) for index in range(0, 500, 100)]
    assert set((await scripted(environment, sample)).values()) == {1.0}


@pytest.mark.data
async def test_the_sanitized_rows_of_mbpp(sandbox: Bubblewrap, data_folder: Path, tmp_path: Path) -> None:
    file = data_folder / "mbpp" / "sanitized-mbpp.json.gz"
    if not file.is_file():
        pytest.skip(f"the folder {file.parent} holds no sanitized-mbpp.json.gz")
    environment = Code(path=str(file))
    environment.check(["coder"])
    rows = json.loads(gzip.decompress(file.read_bytes()))
    imports = next(row for row in rows if row["test_imports"] and row["task_id"] in MBPP_SPLITS["test"])
    tasks = [environment.task("test", k) for k in range(environment.size("test") or 0)]
    chosen = [task for task in tasks if task.question.startswith(imports["prompt"])]
    assert len(chosen) == 1
    assert set((await scripted(environment, [*chosen, tasks[0], tasks[-1]])).values()) == {1.0}


class TestRewardWeights:
    """Parts of the reward beside the tests, as in MRLM's code environment."""

    async def earned(self, path: str, text: str, **settings: Any) -> Any:
        environment = Code(path=path, **settings)
        [episode] = await play(
            environment, Solo(), ["coder"], {"coder": lines(text)}, environment.task("train", 0)
        )
        assert episode.success is not None
        return (
            episode.rewards["coder"],
            episode.success,
            episode.info.get("reward_parts", {}).get("coder", {}),
        )

    async def test_the_reward_is_the_weighted_mean_and_success_the_score_of_the_tests(
        self, mbpp: str
    ) -> None:
        weights = {"passed": 1.0, "solved": 1.0, "runs": 0.5}  # MRLM: share + 1 for all − ½ for an error
        reward, success, parts = await self.earned(mbpp, WRONG, reward_weights=weights)
        assert parts == {"passed": pytest.approx(1 / 3), "solved": 0.0, "runs": 1.0}
        assert (reward, success) == (pytest.approx((1 / 3 + 0.5) / 2.5), 0.0)
        reward, success, parts = await self.earned(mbpp, RIGHT, reward_weights=weights)
        assert (reward, success) == (1.0, 1.0)
        broken = fenced("def double(x):\n    return 2 * x +")
        reward, success, parts = await self.earned(mbpp, broken, reward_weights={**weights, "syntax": 0.5})
        assert parts == {"passed": 0.0, "solved": 0.0, "runs": 0.0, "syntax": 0.5}
        assert (reward, success) == (pytest.approx(0.25 / 3), 0.0)

    async def test_style_counts_as_far_as_the_tests_pass(self, mbpp: str) -> None:
        weights = {"passed": 1.0, "style": 1.0}
        pretty = 'def double(number):\n    """Return twice the number."""\n    return {}'
        right, _, parts = await self.earned(
            mbpp, fenced(pretty.format("number + number")), reward_weights=weights
        )
        assert (right, parts["style"]) == (1.0, 1.0)
        wrong, _, parts = await self.earned(mbpp, fenced(pretty.format("0")), reward_weights=weights)
        assert (wrong, parts["style"]) == (0.0, 0.0)
        plain, _, _ = await self.earned(mbpp, RIGHT, reward_weights=weights)
        assert plain == pytest.approx((1 + 4 / 5) / 2)

    async def test_the_syntax_of_a_body_includes_the_problems_beginning(
        self, sandbox: Bubblewrap, tmp_path: Path
    ) -> None:
        path = folder(tmp_path, HALVE, {**HALVE, "task_id": "Halve/1"})
        weights = {"solved": 1.0, "syntax": 1.0}
        body = "    return math.floor(x / 2)\n"
        reward, _, parts = await self.earned(path, fenced(body), format="humaneval", reward_weights=weights)
        assert (reward, parts["syntax"]) == (1.0, 1.0)

    @pytest.mark.parametrize(
        ("weights", "problem"),
        [
            ({"syntax": 1.0}, "passed"),
            ({"passed": 1.0, "style": -0.5}, "-0"),
            ({"passed": 1.0, "stile": 0.5}, "stile"),
            ({"passed": float("inf")}, "finite"),
        ],
    )
    def test_impossible_weights_are_errors(self, weights: dict[str, float], problem: str) -> None:
        with pytest.raises(ValidationError, match=problem):
            Code(reward_weights=weights)
