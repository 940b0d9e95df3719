"""Training with outside programs."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.support.serving import Reciting, Watching, staged
from tests.support.tiny import sections

from kapelle.errors import ConfigError
from kapelle.models.weights import weights_hash
from kapelle.rollout.setup import RolloutSetup
from kapelle.training.step_report import Step
from kapelle.training.trainer import Trainer
from kapelle.types import Constraint, Message, Task

TaskProgram = Callable[[OpenAI, dict[str, Any]], None]


def trainer(
    watching: Watching,
    environment: dict[str, Any] | None = None,
    run_dir: Path | None = None,
    *,
    resume: bool = False,
    **over: Any,
) -> Trainer:
    made = sections(
        environment={"name": "external", "port": 0, **(environment or {})},
        workflow={"name": "external"},
        **{
            "team": {
                "agents": [{"name": "planner"}, {"name": "coder"}],
                "lora": {"rank": 2, "alpha": 4.0},
                "sampling": {"max_tokens": 6},
            },
            "training": {"steps": 2, "tasks_per_step": 2, "max_failed_share": 0.0},
            **over,
        },
    )
    return Trainer(**made, observer=watching, run_dir=run_dir, resume=resume)


@contextmanager
def programs(url: str, play: TaskProgram, count: int = 2) -> Iterator[list[BaseException]]:
    """Run episodes until training is over, in `count` threads that replace processes."""
    faults: list[BaseException] = []

    def work() -> None:
        try:
            with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
                while True:
                    play(client, client.post("/task", body={}, cast_to=dict[str, Any]))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            faults.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield faults
    for thread in threads:
        thread.join(60.0)


def session(client: OpenAI, task: dict[str, Any]) -> OpenAI:
    return client.with_options(default_headers={"x-kapelle-session": task["session"]})


def say(client: OpenAI, agent: str, messages: list[Any], of: str = "team") -> Any:
    """Send a request with other sampling settings, which training replaces by the recipe's."""
    answer = client.chat.completions.create(model=f"{of}/{agent}", messages=messages, temperature=0.1, seed=3)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answer


@pytest.mark.slow
def test_two_agents_learn_from_a_programs_rewards() -> None:
    tasks: list[dict[str, Any]] = []

    def play(client: OpenAI, task: dict[str, Any]) -> None:
        tasks.append(task)
        own = session(client, task)
        plan: list[Any] = [{"role": "user", "content": f"plan {task['task']['index']}"}]
        say(own, "planner", plan)
        say(
            own,
            "coder",
            [{"role": "system", "content": "Code."}, {"role": "user", "content": plan[-1]["content"] or "?"}],
            of="sums",  # the run's name, by which it is served later
        )
        plan.append({"role": "user", "content": "again"})
        last = say(own, "planner", plan).choices[0].message.content or ""
        body = {"rewards": {"planner": (len(last) % 7) / 7, "coder": (task["seed"] % 5) / 5}, "success": 1.0}
        client.post(f"/sessions/{task['session']}/reward", body=body, cast_to=object)

    watching = Watching()
    steps: list[Step] = []
    with trainer(watching, name="sums") as made, programs(watching.url, play) as faults:
        steps = list(made.steps())
        made.close()
    assert [getattr(error, "status_code", error) for error in faults] == [410, 410], "training is over"
    for number, step in enumerate(steps, 1):
        assert [len(group.episodes) for group in step.groups] == [3, 3]
        for group in step.groups:
            mine = [task for task in tasks if task["task"]["id"] == group.task.id]
            assert sorted(task["seed"] for task in mine) == sorted(episode.seed for episode in group.episodes)
            for episode in group.episodes:
                assert episode.error is None
                assert episode.success == 1.0
                assert episode.rewards["coder"] == (episode.seed % 5) / 5
                first, coder, last = episode.turns
                assert [turn.agent for turn in episode.turns] == ["planner", "coder", "planner"]
                assert {turn.version for turn in episode.turns} == {number - 1}, (
                    "of the weights that were published last"
                )
                assert last.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == (
                    first.prompt_ids + first.completion_ids
                )
                assert coder.new_messages[0].content == "Code."


def test_a_requested_schema_masks_sampler_and_trainer_alike() -> None:
    """Over both APIs; the trainer computes the log-probs among the allowed tokens."""
    pytest.importorskip("llguidance")
    schema: Any = {
        "type": "object",
        "properties": {"go": {"enum": ["left", "right"]}},
        "required": ["go"],
        "additionalProperties": False,
    }

    def play(client: OpenAI, task: dict[str, Any]) -> None:
        own = session(client, task)
        way = {"name": "way", "schema": schema}
        form: Any = {"type": "json_schema", "json_schema": way}
        answer = own.chat.completions.create(
            model="team/planner", messages=[{"role": "user", "content": "plan"}], response_format=form
        )
        expected: Any = {"type": "json_schema", **way}
        other = own.responses.create(model="coder", input="code", text={"format": expected})
        went = [
            json.loads(text or "")["go"] for text in (answer.choices[0].message.content, other.output_text)
        ]
        own.post("/reward", body={"reward": went.count("left") / 2}, cast_to=object)

    watching = Watching()
    team = {
        "agents": [{"name": "planner"}, {"name": "coder"}],
        "lora": {"rank": 2, "alpha": 4.0},
        "sampling": {"max_tokens": 40},
    }
    with trainer(watching, team=team) as made, programs(watching.url, play):
        steps = list(made.steps())
        made.close()
    for step in steps:
        assert step.metrics["parity/max"] <= 1e-4
        turns = [turn for group in step.groups for each in group.episodes for turn in each.turns]
        assert {turn.constraint for turn in turns} == {Constraint.json_schema(schema)}
        assert len(turns) == 12


@pytest.mark.slow
def test_a_run_resumes_with_its_tasks_and_weights(tmp_path: Path) -> None:
    """Its programs call the new server, and get the next tasks and the saved weights."""
    over: dict[str, Any] = {
        "training": {"steps": 3, "tasks_per_step": 2, "max_failed_share": 0.0},
        "evaluation": {"before_and_after": False},
        "checkpoint": {"every": 1},
    }

    acting: dict[int, set[str]] = {}
    """Step → the weights that sampled."""
    left: list[str] = []
    """The weights with which each run ended."""

    def played(run: Path | None, most: int, *, resume: bool = False) -> dict[int, list[tuple[Any, ...]]]:
        """Return step → task, seed and version of the weights of each episode."""

        def play(client: OpenAI, task: dict[str, Any]) -> None:
            own = session(client, task)
            say(own, "coder", [{"role": "user", "content": task["task"]["id"]}])
            own.post("/reward", body={"reward": (task["seed"] % 5) / 5}, cast_to=object)

        watching, found = Watching(), {}
        with trainer(watching, run_dir=run, resume=resume, **over) as made, programs(watching.url, play):
            for step in made.steps(most):
                found[step.number] = sorted(
                    (group.task.id, episode.seed, {turn.version for turn in episode.turns}.pop())
                    for group in step.groups
                    for episode in group.episodes
                )
                turns = [turn for group in step.groups for each in group.episodes for turn in each.turns]
                acting[step.number] = {turn.weights_hash for turn in turns}
            left.append(weights_hash(made.engine.weights("coder")))
            made.close()
        return found

    broke_off = played(tmp_path / "run", 1)
    resumed = played(tmp_path / "run", 2, resume=True)
    assert acting[2] == {left[0]} != acting[1]
    assert broke_off | resumed == played(None, 3)
    assert [{version for *_, version in each} for each in resumed.values()] == [{1}, {2}]


def test_a_first_call_without_a_task_gets_one() -> None:
    """Its conversation is its session, whose name the answer contains, for the reward."""

    def play(client: OpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "2+2?"}]
        name = ""
        for _ in range(2):
            name = say(client, "planner", messages).model_extra["kapelle"]["session"]
            messages.append({"role": "user", "content": "and?"})
        client.post(f"/sessions/{name}/reward", body={"reward": 0.5}, cast_to=object)

    watching = Watching()
    with trainer(watching) as made:

        def work() -> None:
            with OpenAI(base_url=watching.url, api_key="none", max_retries=0) as client:
                for _ in range(6):
                    play(client)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        step = next(made.steps(1))
        thread.join(60.0)
    for group in step.groups:
        for episode in group.episodes:
            assert (episode.error, len(episode.turns), dict(episode.rewards)) == (None, 2, {"planner": 0.5})


PROGRAM = """
import json, os, urllib.request
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))
said = post("/chat/completions", {"model": "team/coder", "messages": [{"role": "user", "content": os.environ["KAPELLE_TASK"]}]})
if os.environ["KAPELLE_INDEX"] == BROKEN:
    raise SystemExit("out of luck")
post("/reward", {"reward": len(said["choices"][0]["message"]["content"]) % 3 / 2})
"""


def test_settings_that_cannot_train_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"environment.name: external"):
        Trainer(**sections(workflow={"name": "external"}))
    with pytest.raises(ConfigError, match=r"episode.environment_workers"):
        trainer(Watching(), episode={"environment_workers": 1})
    with pytest.raises(ConfigError, match=r"training.asynchronous"):
        trainer(Watching(), training={"steps": 1, "asynchronous": True, "max_staleness": 1})


def test_demonstrations_need_a_teacher_and_a_program_to_start() -> None:
    with pytest.raises(ConfigError, match=r"`environment.teacher`"):
        trainer(Watching(), warmup={"steps": 1, "demonstrations": 1})
    with pytest.raises(ConfigError, match=r"environment\.command"):
        trainer(Watching(), {"teacher": "tests.services.policy.test_outside:taught"})
    with pytest.raises(ConfigError, match="teacher"):
        trainer(Watching(), {"teacher": "tests.services.policy.test_outside:nobody", "command": ["true"]})


def taught(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    return f"{agent}!"


def numbered(agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
    with (Path(os.environ["KAPELLE_CACHE"]) / "shown").open("a") as shown:
        shown.write(f"{task.data['index']}\n")
    return "!"


@pytest.mark.slow
def test_demonstrations_are_of_the_tasks_that_training_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program writes the number of its task into its prompts: it is as long in demonstrations as in training."""
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))
    environment = {
        "command": [sys.executable, "-c", PROGRAM.replace("BROKEN", "'none'")],
        "teacher": "tests.services.policy.test_outside:numbered",
        "tasks": 2,
    }
    over: dict[str, Any] = {
        "warmup": {"steps": 1, "demonstrations": 2},
        "training": {"steps": 1, "tasks_per_step": 2},
        "team": {
            "agents": [{"name": "coder"}],
            "lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 2},
        },
        "algorithm": {"name": "grpo", "group_size": 2},
    }
    with trainer(Watching(), environment, **over) as made:
        [step] = made.steps(1)
    shown = set(map(int, (tmp_path / "shown").read_text().split()))
    assert shown == {group.task.data["index"] for group in step.groups}
    assert shown == {0, 1}


ODD_REWARDS = [
    (
        '{"reward": 1.5}',
        r"`reward` is 1\.5.*\[-1, 1\].*`environment\.rewards`",
    ),
    ('{"rewards": {"first": 0.5, "second": -7}}', r"`rewards\.second` is -7, .*\[-1, 1\]"),
    ('{"reward": NaN}', "no NaN and no Infinity"),
    ('{"reward": 1e999}', "reward"),
    ('{"reward": "1"}', "`reward`: .*number"),
    ('{"reward": true}', "`reward`: .*number"),
    ('{"reward": null}', "Post `reward`"),
    ('{"reward": 1, "success": 2}', "`success`"),
    ('{"reward": 1, "info": {"x": %s}}' % ("[" * 70 + "]" * 70), "info.* levels deep"),
    ('{"reward": 1, "info": {"x": 1%s}}' % ("0" * 3000), "info.* integer of"),
    ("[1]", "must be a JSON object"),
]


def test_an_invalid_reward_is_rejected_at_once_and_can_be_corrected(
    setup: RolloutSetup, web: httpx.Client
) -> None:
    with staged(setup, Reciting(lambda _: "words"), rewards=(-1.0, 1.0)) as stage:
        name = web.post(f"{stage.url}/task", json={}).json()["session"]
        request = {"model": "team/first", "messages": [{"role": "user", "content": "x"}]}
        there = f"{stage.url.removesuffix('/v1')}/sessions/{name}/v1"
        assert web.post(f"{there}/chat/completions", json=request).status_code == 200
        whole = web.post(f"{there}/chat/completions", json={**request, "model": "team"})
        assert whole.status_code == 400, "a guess would train the wrong one"
        assert "first, second" in whole.json()["error"]["message"]
        for body, reason in ODD_REWARDS:
            for address in (f"{there}/reward", f"{stage.url}/sessions/{name}/reward"):
                raised = web.post(
                    address, content=body.encode(), headers={"content-type": "application/json"}
                )
                assert raised.status_code == 400, body
                assert re.search(reason, raised.json()["error"]["message"]), raised.text
        reply = web.post(f"{there}/reward", json={"rewards": {"first": -1}, "info": {"tests": [1, None]}})
        assert reply.status_code == 200, reply.text
        assert web.post(f"{there}/reward", json={"reward": 1}).status_code in (404, 410), "it has one"
    [episode] = stage.episodes
    assert (episode.error, dict(episode.rewards)) == (None, {"first": -1.0})
    assert episode.info["tests"] == [1, None]


@pytest.mark.long
@pytest.mark.slow
def test_waiting_for_a_free_program_does_not_count() -> None:
    """One program at a time runs six episodes; the last one waits for longer than `environment.timeout`."""
    watching = Watching()
    program = "import time; time.sleep(1.5)" + PROGRAM.replace("BROKEN", "'none'")
    environment = {"command": [sys.executable, "-c", program], "programs": 1, "timeout": 5.0}
    over = {"steps": 1, "tasks_per_step": 2, "max_failed_share": 0.0}
    with trainer(watching, environment, training=over) as made:
        [step] = made.steps(1)
    assert [episode.error for group in step.groups for episode in group.episodes] == [None] * 6
