"""What people get wrong in Python, and what they are told."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pydantic
import pytest

import kapelle
from kapelle.algorithms.grpo import GRPO
from kapelle.cli import main
from kapelle.environments.arithmetic import Arithmetic
from kapelle.settings.messages import in_python
from kapelle.workflows.solo import Solo

make: Any = GRPO
trainer: Any = kapelle.Trainer
REST: dict[str, Any] = {"workflow": Solo(), "algorithm": GRPO()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: make(group_sise=3), "Unknown key 'group_sise'. Did you mean 'group_size'?"),
        (lambda: make(loss={"clip_lo": 1}), "Unknown key 'clip_lo'. Did you mean 'clip_low'?"),
        (lambda: make(group_size=0), "Input should be greater than or equal to 2"),
    ],
)
def test_settings_say_which_one_was_meant_in_three_lines(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        wrong()
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError, match=r"GRPO takes its settings by name, such as GRPO\(group_size=…\)\."):
        make(8)
    assert "values" not in signature(GRPO).parameters


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: trainer(enviroment=Arithmetic(), **REST), "`Trainer` has no keyword 'enviroment'. Did you mean 'environment'?"),
        (lambda: trainer(environment=Arithmetic, **REST), "`environment` is the class Arithmetic. Make one of it: environment=Arithmetic(…)."),
        (lambda: trainer(environment="arithmetic", **REST), "`environment` is a section, and 'arithmetic' its `name`. Write `environment: {name: arithmetic}`"),
        (lambda: trainer(environment=Solo(), **REST), "The environment 'Solo' has no `reward_range`, no `sources`, no `size`, no `task`, no `start`."),
        (lambda: trainer(environment=Arithmetic(), steps=3, **REST), "`Trainer` has no keyword 'steps'. `kapelle.train(model, dataset, reward)` takes it, or `training={'steps': …}`."),
        (lambda: trainer("demo"), "Trainer takes no name of a recipe. Write Trainer.from_recipe('demo')."),
        (lambda: trainer.from_recipe("demo", steps=3), "`steps` cannot be combined with a whole recipe."),
        (lambda: trainer.from_recipe("demo", training={"steps": 3}), "`training` cannot be combined with a whole recipe."),
        (lambda: trainer.from_recipe("demo", {"training.steps": 3}), "{'training.steps': 3} is not a setting. Write it as text, such as 'training.steps=100'."),
    ],
)  # fmt: skip
def test_a_trainer_refuses_what_it_would_not_use(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(kapelle.ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": object()}, "The fields of a GRPOConfig are settings here, by the same names: `learning_rate`, `num_generations`, `max_completion_length`."),
        ({"processing_class": None}, "A model brings its own tokeniser and chat template: `model`."),
        ({"tokenizer": None}, "A model brings its own tokeniser and chat template: `model`."),
        ({"ref_model": "a/b"}, "A reference is made where it is needed, of the policy at its start: "),
        ({"batch_size": 4}, "A step takes `tasks_per_step` tasks, each tried `algorithm.group_size` times."),
    ],
)  # fmt: skip
def test_arguments_of_trl_without_a_value_of_ours_say_what_to_do(given: dict[str, Any], message: str) -> None:
    call: Any = kapelle.train
    with pytest.raises(kapelle.ConfigError) as caught:
        call("embedded", [{"question": "1+1", "answer": "2"}], lambda completion: 1.0, run_dir=None, **given)
    assert str(caught.value).startswith(f"`kapelle.train` has no keyword '{next(iter(given))}'. {message}")


def test_steps_that_cannot_be_counted_are_told_by_the_name_that_was_given() -> None:
    said = r"epochs.* have no end\. .*\(`num_train_epochs` is read as `training"
    with pytest.raises(kapelle.ConfigError, match=said), pytest.warns(UserWarning, match="num_train_epochs"):
        trainer(num_train_epochs=2, environment=Arithmetic(), **REST)
    with pytest.raises(kapelle.ConfigError, match=said), pytest.warns(UserWarning, match="num_train_epochs"):
        trainer.from_recipe("demo", "num_train_epochs=2")


TEAM: dict[str, Any] = {"environment": Arithmetic(), **REST}
from_recipe: Any = kapelle.Trainer.from_recipe
arena: Any = kapelle.arena
AS_TEXT = 'Write settings of a recipe as text: Trainer.from_recipe("demo", "training.steps=3", run_dir="runs/mine").'
TAKEN = "mine already holds a run. Continue it with `resume=True`, or choose another `run_dir`."
FOREIGN = "foreign is not empty and not a run of kapelle: it holds 'x.txt'. Choose another `run_dir`."
NOTHING = "There is nothing to resume without a run directory. Name it with `run_dir`."
GO_ON = "`Trainer.from_recipe('RUN/config.yaml', run_dir='RUN', resume=True)` goes on with a run."
SEVERAL = "`torchrun --nproc-per-node N` starts several processes; "
REAL = "Recipe 'plain.yaml' has no section `real`, which `real=True` lays over it. Leave `real=True` out and set what a pretrained model needs"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run `mine`, a folder that is none, and recipes."""
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    Path("foreign/x.txt").write_text("not ours")
    Path("plain.yaml").write_text("environment: {name: arithmetic}\n")
    trainer(run_dir="mine", **TEAM).close()
    shutil.copytree("mine", "mine 2")
    return tmp_path


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: from_recipe("demo", resume=True), NOTHING),
        (lambda: from_recipe("demo", run_dir="mine"), TAKEN),
        (lambda: from_recipe("demo", run_dir="foreign"), FOREIGN),
        (lambda: from_recipe("demo", run_dir="fresh", resume=True), "There is no run at fresh to resume. Leave out `resume=True` to start it."),
        (lambda: from_recipe("mine"), "'mine' is a run. Continue it with `Trainer.from_recipe('mine/config.yaml', run_dir='mine', resume=True)`; "),
        (lambda: from_recipe("mine@best"), "'mine@best' is a checkpoint of a run. Begin another run with its weights: `Trainer.from_recipe(RECIPE, start_from='mine@best', run_dir=…)`."),
        (lambda: from_recipe("plain.yaml", real=True), REAL),
        (lambda: from_recipe(3), "A recipe is 3. Give the name of a built-in one, or a YAML file."),
        (lambda: from_recipe("demo", overlays="x.yaml"), "`overlays` is the text 'x.yaml'. Give a list of texts: overlays=['x.yaml']."),
        (lambda: from_recipe("demo", "training.step=3"), "Unknown key 'training.step' (set in the call). Did you mean 'steps'?"),
        (lambda: from_recipe("demo", "optimizer.lr=fast"), "'optimizer.lr' cannot be 'fast' (set in the call): "),
        (lambda: from_recipe("demo", "out_dir=x"), "Unknown key 'out_dir' (set in the call). `run_dir=DIR` says where."),
        (lambda: from_recipe("demo", "resume=true"), f"Unknown key 'resume' (set in the call). {GO_ON}"),
        (lambda: from_recipe("demo", "num_gpus=2"), f"Unknown key 'num_gpus' (set in the call). {SEVERAL}`train_engine.name` is "),
        (lambda: from_recipe("demo", "xyzzy=3"), "Unknown key 'xyzzy' (set in the call). `print(kapelle.load_recipe(RECIPE).yaml())` prints all settings."),
        (lambda: from_recipe("demo", runs_dir="x"), "`Trainer.from_recipe` has no keyword 'runs_dir'. Did you mean 'run_dir'?"),
        (lambda: from_recipe("demo", foo_bar=1), "`Trainer.from_recipe` has no keyword 'foo_bar'. Known: engine, metrics, models, "),
        (lambda: from_recipe("demo", origin={}), "`Trainer.from_recipe` has no keyword 'origin'. "),
        (lambda: trainer(kapelle.load_recipe("demo").config, runs_dir="x"), "`Trainer` has no keyword 'runs_dir'. Did you mean 'run_dir'?"),
        (lambda: trainer(kapelle.load_recipe("demo").config, lr=1.0), "`lr` cannot be combined with a whole recipe."),
        (lambda: from_recipe("demo", engine="vllm"), f"`engine` cannot be combined with a whole recipe. {AS_TEXT}"),
        (lambda: from_recipe("demo", learning_rate=1.0), f"`learning_rate` cannot be combined with a whole recipe. {AS_TEXT}"),
        (lambda: from_recipe("demo", "trackers=[{name: tensorboard}]"), "The tracker 'tensorboard' needs a run directory, whose metrics it shows. Name one, `run_dir="),
        (lambda: trainer.from_run("mine", "training.stepz=3"), "Unknown key 'training.stepz' (set in the call). Did you mean 'steps'?"),
        (lambda: trainer.from_run("mine", resumes=True), "`Trainer.from_run` has no keyword 'resumes'. Did you mean 'resume'?"),
        (lambda: trainer.from_run("mine", training={"steps": 3}), "`training` cannot be combined with a whole run. Write settings of a run as text: Trainer.from_run("),
        (lambda: trainer.from_run("mine", run_dir="mine"), TAKEN),
        (lambda: kapelle.load_recipe("plain.yaml", real=True), REAL),
        (lambda: kapelle.load_recipe("demo", settings="seed=1"), "`settings` is the text 'seed=1'. Give a list of texts: settings=['seed=1']."),
        (lambda: kapelle.load_recipe("demo", settings=["run_dir=x"]), "Unknown key 'run_dir' (set in the call). `run_dir=DIR` says where."),
        (lambda: trainer(kapelle.load_recipe("demo").config, run_dir="mine"), TAKEN),
        (lambda: trainer(kapelle.load_recipe("demo").config, resume=True), NOTHING),
        (lambda: trainer(resume=True, **TEAM), NOTHING),
        (lambda: trainer(run_dir="mine", **TEAM), TAKEN),
        (lambda: trainer(run_dir="foreign", resume=True, **TEAM), FOREIGN),
        (trainer, "The recipe has no `environment.name`. Add `environment: {name: …}`."),
        (lambda: trainer(training={"output_dir": "x"}, **TEAM), "Unknown key 'training.output_dir'. `run_dir=DIR` says where."),
        (lambda: trainer(training={"resume": True}, **TEAM), f"Unknown key 'training.resume'. {GO_ON}"),
        (lambda: trainer(training={"num_gpus": 2}, **TEAM), f"Unknown key 'training.num_gpus'. {SEVERAL}`train_engine.name` is "),
        (lambda: trainer(**TEAM).train("many"), "`steps` is 'many'. Give a whole number of at least 0, or leave it out."),
        (lambda: next(trainer(**TEAM).steps(1.5)), "`count` is 1.5. Give a whole number of at least 0, or leave it out."),
        (lambda: trainer(**TEAM).evaluate(-1), "`problems` is -1. Give a whole number of at least 1, or leave it out."),
        (lambda: trainer(**TEAM).load_checkpoint("foreign"), "There is no whole checkpoint in foreign. Restore one from a copy, or start a run in another `run_dir`."),
        (lambda: arena("nash", environment="kuhn_poker"), "An arena needs at least two players, for example `kapelle.arena('runs/mine', 'nash', environment='kuhn_poker')`."),
        (lambda: trainer.from_run("mine 2", run_dir="mine 2"), "mine 2 already holds a run. Continue it with `resume=True`, or"),
        (lambda: from_recipe("mine 2"), "'mine 2' is a run. Continue it with `Trainer.from_recipe('mine 2/config.yaml', run_dir='mine 2', resume=True)`; "),
        (lambda: arena("nash", "random"), "Name the game with `environment`, because no player is a run."),
        (lambda: arena("nash", "random", environment="kuhn_poker", output="foreign"), "foreign holds other files than an arena. Name another `output`."),
        (lambda: arena("nash", "random", environment="kuhn_poker", settings="seed=1"), "`settings` is the text 'seed=1'. Give a list of texts: settings=['seed=1']."),
        (lambda: kapelle.blame("mine", "evaluation.problms=3"), "Unknown key 'evaluation.problms' (set in the call). Did you mean 'problems'?"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("place")
def test_a_call_is_told_of_its_own_arguments(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(kapelle.KapelleError) as caught:
        wrong()
    said = str(caught.value)
    assert said.startswith(message)
    assert not re.search(r"--(?!nproc)[a-z]", said), "no option of the command line"
    assert "command line" not in said


def test_what_a_program_of_others_says_is_quoted_as_it_is() -> None:
    theirs = "The judge ended with: usage: tool [--output FILE] [--environment E] (kapelle train --resume x)"
    with pytest.raises(kapelle.ConfigError) as caught, in_python():
        raise kapelle.ConfigError(theirs)
    assert str(caught.value) == theirs


def test_a_command_is_told_of_its_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "--run-dir", str(place / "mine")]) == 2
    assert "Continue it with --resume, or choose another --run-dir" in capsys.readouterr().err
    assert main(["train", "demo", "training.step=3"]) == 2
    assert "(set on the command line)" in capsys.readouterr().err
    assert main(["arena", "nash", "random"]) == 2
    assert "Name the game with --environment" in capsys.readouterr().err


def test_between_steps_other_calls_have_words_of_their_own(place: Path) -> None:
    one_a_step = {"training": {"tasks_per_step": 1, "steps": 2}, "team": {"sampling": {"max_tokens": 2}}}
    with trainer(**TEAM, **one_a_step) as here:
        for _ in here.steps(1):
            with pytest.raises(kapelle.ConfigError, match=r"Unknown key 'training\.step' "):
                from_recipe("demo", "training.step=3")
