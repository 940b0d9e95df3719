"""A mistake in a custom workflow is one line: an error before a model loads if possible, else the episodes' reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.cli import main
from kapelle.cli.new import skeleton

STEP = "        await scene.step({writer: answer.text}, final=answer.text)\n"
SIGNATURE = "self, agents: Sequence[kapelle.Agent], environment: kapelle.Environment"
SMALL = ("warmup=null", "training.steps=1", "training.tasks_per_step=2", "evaluation=null")

BEFORE = {
    "check raises": ("len(agents) != 2", "len(agent) != 2", "`check` raises NameError: name 'agent' is not defined (talk.py, line"),
    "check takes less": (SIGNATURE, "self, agents", "`check` takes (agents), but is called with (agents, environment)."),
    "check waits": ("    def check(", "    async def check(", "`check` is async. Write `def`, not `async def`"),
    "run takes less": ("self, scene: Scene", "self", "`run` takes (), but is called with (scene)."),
    "run yields": (STEP, f"{STEP}        yield\n", "`run` has a `yield`. Write `async def run(self, scene)` without it."),
}  # fmt: skip
"""What is written, in place of what, and what is said before a model is loaded."""

WHILE = {
    "a forgotten await": ("draft = await scene", "draft = scene", "'coroutine' object has no attribute 'text'. Is an `await` missing? (talk.py, line"),
    "no await at all": ("await ", "", "'coroutine' object has no attribute 'text'. Is an `await` missing? (talk.py, line"),
    "a forgotten step": (STEP, "        pass\n", "The workflow 'talk.py:Talk' ended without a step"),
    "a step that is not awaited": ("await scene.step", "scene.step", "The workflow 'talk.py:Talk' ended without a step"),
    "an agent that is not there": ("scene[critic]", "scene['judge']", "'judge'"),
    "a number to read": ("say(notes.text)", "say(3)", "The workflow gives 'agent_0' a int to read. Pass strings to `say`"),
    "a turn to read": ("say(notes.text)", "say(notes)", "The workflow gives 'agent_0' a Turn to read. Pass strings to `say`, such as `turn.text`"),
    "a text in place of texts": (
        "await scene[writer].say(question)",
        "(await scene.together({writer: question}))[writer]",
        "The workflow gives 'agent_0' a string to read. Pass strings to `say`, such as `turn.text`, and a list of strings",
    ),
    "a list in place of a mapping": ("await scene[writer].say(question)", "(await scene.together([writer]))[writer]", "The workflow gives `together` a list."),
    "a turn as an action": ("{writer: answer.text}", "{writer: answer}", "The workflow gives `step` a Turn. Give a mapping from agents to strings"),
    "a turn as the answer": ("final=answer.text", "final=answer", "The workflow gives `step` a Turn. Give a mapping from agents to strings"),
    "a change of its settings": ("        question =", "        self.n = 1\n        question =", "`n`: settings are frozen and cannot be changed (talk.py, line"),
}  # fmt: skip
"""The same of what only an episode shows."""


def refused(
    case: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Train with a changed workflow; return the one line that is said of it."""
    old, new, _ = case
    monkeypatch.chdir(tmp_path)
    for file, text in skeleton("workflow", "talk").items():
        assert old in text or file != "talk.py"
        Path(file).write_text(text.replace(old, new) if file == "talk.py" else text, encoding="utf-8")
    assert main(["train", "talk.yaml", *SMALL, "algorithm.group_size=2"]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("wrong", BEFORE)
def test_an_invalid_workflow_raises_an_error_before_a_model_loads(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(BEFORE[wrong], tmp_path, monkeypatch, capsys)
    assert line.startswith("kapelle: The workflow 'talk.py:Talk' does not fit the run: ")
    assert BEFORE[wrong][2] in line
    assert not Path("runs").exists()


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("wrong", WHILE)
def test_an_error_of_a_workflow_s_step_is_reported(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(WHILE[wrong], tmp_path, monkeypatch, capsys)
    assert line.startswith("kapelle: 8 episodes failed with the same error")
    assert WHILE[wrong][2] in line
