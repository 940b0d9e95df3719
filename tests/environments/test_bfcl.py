from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import expert, lines, play, team_of, transcript

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.bfcl import Bfcl, Category, gold_calls
from kapelle.environments.grading.text.tool_call import Form, ReadCall, write_calls
from kapelle.errors import DataError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Split
from kapelle.workflows.debate import Debate
from kapelle.workflows.solo import Solo

SCHEMA = {
    "name": "weather",
    "description": "Forecast of a city.",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FORMS: tuple[Form, ...] = ("hermes", "llama", "pythonic")


def folder(path: Path, rows: int = 12, **changes: Any) -> str:
    (path / "possible_answer").mkdir()
    questions, answers = [], []
    for k in range(rows):
        row = {"id": f"simple_python_{k}", "question": [[{"role": "user", "content": f"Rain in Bern {k}?"}]]}
        questions.append({**row, "function": [SCHEMA], **changes})
        gold = [{"weather": {"city": [f"Bern {k}", f"Bern {k}, CH"], "days": ["", 1]}}]
        answers.append({"id": row["id"], "ground_truth": gold})
    irrelevant = [{**question, "id": f"irrelevance_{k}"} for k, question in enumerate(questions)]
    for name, content in (
        ("simple_python", questions),
        ("irrelevance", irrelevant),
        ("possible_answer/simple_python", answers),
    ):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def only(path: str, *categories: Category, form: Form = "hermes") -> Bfcl:
    return Bfcl(path=path, categories=categories, form=form, test_share=0.5)


async def test_a_question_is_answered_with_a_call(tmp_path: Path) -> None:
    environment = only(folder(tmp_path), "simple_python", form="llama")
    task = environment.task("train", 0)
    number = task.data["id"].rpartition("_")[2]
    call = json.dumps({"name": "weather", "parameters": {"city": f"bern {number}"}})
    [episode] = await play(environment, Solo(), ["caller"], {"caller": lines(call)}, task)
    schema = json.dumps(SCHEMA)
    assert transcript(episode) == [
        (
            f"0 seen=0 You can call these tools:\n<tools>\n{schema}\n</tools>\n"
            "To call a tool, answer with this object and nothing else; several calls are a list of them:\n"
            '{"name": "tool name", "parameters": {"argument": "value"}}\n\n'
            f"Rain in Bern {number}? -> caller: {call}"
        )
    ]
    assert episode.rewards == {"caller": 1.0}
    assert episode.info["id"] == f"simple_python_{number}"


@pytest.mark.parametrize("form", FORMS)
async def test_the_script_is_correct_and_near_misses_are_not(tmp_path: Path, form: Form) -> None:
    environment = only(folder(tmp_path), "simple_python", form=form)
    task = environment.task("test", 1)
    [gold] = gold_calls(task.data["accepted"])
    others = [f for f in FORMS if f != form]
    wrong = [
        "",
        "It will rain.",
        write_calls([ReadCall("weather", {})], form),
        write_calls([ReadCall("weather", {**gold.arguments, "city": "Basel"})], form),
        write_calls([ReadCall("weather", {**gold.arguments, "hours": 1})], form),
        write_calls([ReadCall("rain", gold.arguments)], form),
        write_calls([gold, gold], form),
        *(write_calls([gold], other) for other in others),
    ]
    scripts = {f"w{k}": lines(text) for k, text in enumerate(wrong)}
    for name, script in {"expert": expert(environment), **scripts}.items():
        [episode] = await play(environment, Solo(), [name], {name: script}, task)
        assert episode.rewards == {name: float(name == "expert")}, (name, wrong)


@pytest.mark.parametrize("form", FORMS)
async def test_without_a_useful_tool_no_call_is_correct(tmp_path: Path, form: Form) -> None:
    environment = only(folder(tmp_path), "irrelevance", form=form)
    task = environment.task("train", 0)
    scripts = {"expert": expert(environment), "caller": lines(write_calls([ReadCall("weather", {})], form))}
    for name, script in scripts.items():
        [episode] = await play(environment, Solo(), [name], {name: script}, task)
        assert episode.rewards == {name: float(name == "expert")}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NOT_ALONE = [
    f"{CALL}\nweather(city='Basel')",
    f"{CALL}\nweather('Basel')",
    f'{CALL}\n{{"name": "weather", "parameters": {{"city": "Basel"}}}}',
    f"{CALL}\n```python\nweather(city='Basel')\n```",
    f"{CALL}\n# weather(city='Basel')",
    f"weather(city='Basel')\n{CALL}",
    f"{CALL}\n<weather><city>Basel</city></weather>",
    f'{CALL}\n<invoke name="weather"><parameter name="city">Basel</parameter></invoke>',
    f"{CALL}\nAction: weather\nAction Input: Basel",
    f"{CALL}\n[TOOL_CALLS] []",
    f'{CALL}\n{{"type": "tool_use", "name": "rain", "input": {{}}}}',
    f"{CALL}\n{{'weather': {{'city': 'Basel'}}}}",
]
QUOTED = [
    f"For example:\n```\n{CALL}\n```\nBut I will not.",
    f"<!-- {CALL} -->",
    f"/* {CALL} */",
    f"An example:\n~~~\n{CALL}\n~~~",
    f'doc = """\n{CALL}\n"""',
    f"“{CALL}”",
    f"> {CALL}",
    f"# {CALL}",
    f"One could write `{CALL}`.",
    f'"{CALL}"',
]
OTHER_FORMS = [
    '{"name": "weather", "parameters": {"city": "Bern"}}',
    '```json\n{"name": "weather", "arguments": {"city": "Bern"}}\n```',
    "weather(city='Bern')",
    "`weather(city='Bern')` would be the call.",
    "\"weather('Bern')\"",
    "# weather(city='Bern')",
    "[weather(city='Bern')]",
    "weather (city='Bern')",
    "Let me look.\n```python\nprint(weather(city='Bern'))\n```",
    '<function=weather>{"city": "Bern"}</function>',
    '<|python_tag|>weather.call(city="Bern")',
]
NO_CALL = [
    "None of these tools can help.",
    "The function `weather` gives forecasts, and the question is about an area.",
    "No tool computes f(x) = x(x + 1), so I cannot help (sorry).",
    "<think>weather(city='Bern')? No.</think>None of them fits.",
    "The tool weather(city) reads a city, which is not given.",
]
ALONE = [
    CALL,
    f"I look it up.\n{CALL}\nThe result follows.",
    f"<think>weather(city='Basel')? No.</think>{CALL}",
    f"```xml\n{CALL}\n```",
    f"{CALL}\nI cannot help with the rest (sorry).",
    f'It is a "forecast": {CALL}',
]


@pytest.mark.parametrize("text", NOT_ALONE + QUOTED + OTHER_FORMS + NO_CALL)
async def test_only_calls_that_stand_alone_in_the_form_receive_a_reward(tmp_path: Path, text: str) -> None:
    environment = only(folder(tmp_path), "simple_python")
    task = replace(
        environment.task("train", 0), data={"id": "0", "accepted": [{"weather": {"city": ["Bern"]}}]}
    )
    [episode] = await play(environment, Solo(), ["caller"], {"caller": lines(text)}, task)
    assert episode.rewards == {"caller": 0.0}


@pytest.mark.parametrize("text", ALONE)
async def test_words_beside_calls_and_a_fence_around_them_are_allowed(tmp_path: Path, text: str) -> None:
    environment = only(folder(tmp_path), "simple_python")
    task = replace(
        environment.task("train", 0), data={"id": "0", "accepted": [{"weather": {"city": ["Bern"]}}]}
    )
    [episode] = await play(environment, Solo(), ["caller"], {"caller": lines(text)}, task)
    assert episode.rewards == {"caller": 1.0}


@pytest.mark.parametrize(
    ("texts", "reward"),
    [(NOT_ALONE + QUOTED + OTHER_FORMS + ALONE, 0.0), (NO_CALL, 1.0)],
    ids=["calls", "words"],
)
async def test_a_call_in_any_form_is_no_abstention(tmp_path: Path, texts: list[str], reward: float) -> None:
    environment = only(folder(tmp_path), "irrelevance")
    for text in (*texts, *(["", " \n", "<think>None of them"] if not reward else [])):
        [episode] = await play(
            environment, Solo(), ["caller"], {"caller": lines(text)}, environment.task("train", 0)
        )
        assert episode.rewards == {"caller": reward}, text


async def test_equal_calls_are_equal_votes(tmp_path: Path) -> None:
    environment = only(folder(tmp_path), "simple_python")
    task = environment.task("train", 0)
    [gold] = gold_calls(task.data["accepted"])
    text = write_calls([gold], "hermes")
    scripts = {"a": lines(text), "b": lines("Let me see.\n" + text.replace('": ', '" :  ')), "c": lines("no")}
    [episode] = await play(environment, Debate(rounds=1), [*scripts], scripts, task)
    assert episode.success == 1.0
    assert environment.extract("<tool_call>") is None


def test_faults_of_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multiple"):
        only(folder(tmp_path), "multiple").check(["a"])
    answers = tmp_path / "possible_answer" / "simple_python.jsonl"
    whole = answers.read_text()
    answers.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="simple_python_11"):
        Bfcl(path=str(tmp_path), categories=("simple_python",), test_share=0.4).check(["a"])
    answers.write_text(whole.replace('[{"weather"', '[[{"weather"', 1).replace("}}]", "}}]]", 1))
    with pytest.raises(DataError, match="line 1: `ground_truth`"):
        Bfcl(path=str(tmp_path), categories=("simple_python",), test_share=0.3).check(["a"])


def test_a_row_of_another_form_is_an_error(tmp_path: Path) -> None:
    environment = only(folder(tmp_path, question="why"), "irrelevance")
    with pytest.raises(DataError, match="BFCL"):
        environment.check(["a"])


SINGLE_TURN: tuple[Category, ...] = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_parallel",
    "live_parallel_multiple",
    "irrelevance",
)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    "form", ["hermes", *(pytest.param(form, marks=pytest.mark.long) for form in FORMS[1:])]
)
async def test_every_gold_call_of_bfcl_is_correct(data_folder: Path, form: Form) -> None:
    path = data_folder / "bfcl"
    if not (path / "possible_answer").is_dir():
        pytest.skip(f"the folder {path} holds no possible_answer/ (BFCL)")
    environment = Bfcl(path=str(path), categories=SINGLE_TURN, form=form)
    environment.check(["caller"])
    splits: tuple[Split, ...] = ("train", "test")
    tasks = [environment.task(split, k) for split in splits for k in range(environment.size(split) or 0)]
    assert len(tasks) == 1298 + 240
    tasks = tasks[:: 6 if form == "hermes" else 1]
    scripts = {"caller": expert(environment)}
    stage = RolloutSetup(team_of("caller"), environment, Solo(), ScriptedEngine(scripts))
    groups = await rollout(stage, tasks, 1, 0)
    assert [group.task.data["id"] for group in groups if group.episodes[0].success != 1.0] == []
