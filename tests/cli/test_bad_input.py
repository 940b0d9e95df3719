"""What newcomers get wrong: one line with the way out, exit code 2, before a model is loaded, nothing lost."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle

from kapelle.models.embedded import build_tokenizer
from kapelle.runs.checkpoint import newest_valid
from kapelle.runs.lock import RunLock

Prepare = Callable[[], None]


def corrupt_data() -> None:
    rows = [json.dumps({"question": f"{k}+1?", "answer": f"#### {k + 1}"}) for k in range(5)]
    Path("data").mkdir()
    for name in ("train", "test"):
        lines = rows if name == "test" else [*rows[:2], '{"question": "half a li', *rows[3:]]
        Path(f"data/{name}.jsonl").write_text("\n".join(lines) + "\n")


def broken_gzip() -> None:
    Path("data").mkdir()
    whole = gzip.compress(b'{"question": "1+1?", "answer": "#### 2"}\n' * 50)
    Path("data/test.jsonl.gz").write_bytes(whole)
    Path("data/train.jsonl.gz").write_bytes(whole[: len(whole) // 2])


def model_without_weights() -> None:
    build_tokenizer(64).save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "qwen3"}')


def a_file() -> None:
    Path("weights.bin").write_bytes(b"")


def pennies() -> None:
    text = """
        name: pennies
        team: {agents: 2, sampling: {max_tokens: 2}}
        environment: {name: matrix, game: matching_pennies}
        workflow: {name: play}
        algorithm: {name: grpo, team_reward: individual}
    """
    Path("pennies.yaml").write_text(text)


def nothing() -> None:
    """Prepare nothing."""


MATH = ("gsm8k", "environment.path=data")

CASES: dict[str, tuple[Prepare, tuple[str, ...], str]] = {
    "missing data": (nothing, ("gsm8k", "environment.path=no/such/folder"), "There is no file or folder 'no/such/folder'. Set `environment.path`"),
    "corrupt data": (corrupt_data, MATH, "train.jsonl, line 3"),
    "cut-off data": (broken_gzip, MATH, "train.jsonl.gz"),
    "model that is not there": (nothing, ("demo", "model.path=./model"), "Model folder './model' does not exist."),
    "model of no hub's name": (nothing, ("demo", "model.path=a/b/c"), "Model folder 'a/b/c' does not exist, and the hub has no names like it. Name a folder"),
    "model of another hub": (nothing, ("demo", "model.path=modelscope://a/b"), "'modelscope://a/b' cannot be fetched: models come from folders, the Hugging Face hub and ModelScope. Fetch it with a client of modelscope:// and name the folder."),
    "model by its address": (nothing, ("demo", "model.path=https://huggingface.co/Qwen/Qwen3-0.6B/tree/main"), "Name the model alone: `Qwen/Qwen3-0.6B`."),
    "model of a colleague's machine": (nothing, ("demo", "model.path=D:\\models\\x"), "Model folder 'D:\\models\\x' does not exist"),
    "model at home": (nothing, ("demo", "model.path='~'"), "was not expanded by the shell. Write /"),
    "embedder of no hub's name": (nothing, ("demo", "algorithm.name=qmix", "algorithm.embedder=a/b/c"), "Model folder 'a/b/c' does not exist, and the hub"),
    "teacher of no hub's name": (nothing, ("demo", "warmup=null", "algorithm.name=distill", "algorithm.teacher=runs/none@2"), "Model folder 'runs/none@2' does not exist, and the hub"),
    "past of no run": (nothing, ("demo", "warmup=null", "team.agents.1.weights={past: runs/none@2}"), "Name a run (RUN, RUN@best, RUN@STEP), or a folder"),
    "processes as a setting": (nothing, ("demo", "distributed.strategy=ddp"), "Unknown key 'distributed' (set on the command line). `--launch torchrun --processes N` starts several processes; `train_engine.name` is `ddp` or `fsdp`."),
    "weights gathered in another type": (nothing, ("demo", "train_engine.name=fsdp", "train_engine.param_dtype=bfloat16"), "`train_engine.param_dtype: bfloat16` is not the type in which 'base' computes (float32). Set `model.dtype: bfloat16`, or leave `param_dtype` out."),
    "a text in several processes": (nothing, ("demo", "train_engine.name=fsdp", "train_engine.context_parallel=2"), "Unknown key 'train_engine.context_parallel' (set on the command line). Each text is computed in one process; `training.gradient_checkpointing`"),
    "products of half a process": (nothing, ("demo", "train_engine.name=fsdp", "train_engine.tensor_parallel=0"), "'train_engine.tensor_parallel' cannot be 0 (set on the command line)"),
    "a type of no gradient": (nothing, ("demo", "train_engine.name=fsdp", "train_engine.reduce_dtype=int8"), "'train_engine.reduce_dtype' cannot be 'int8' (set on the command line)"),
    "an option as a setting": (nothing, ("demo", "run_dir=runs/x"), "Unknown key 'run_dir' (set on the command line). `--run-dir DIR` says where."),
    "a key like no other": (nothing, ("demo", "zzz=1"), "Unknown key 'zzz' (set on the command line). `kapelle train RECIPE --dry-run` prints all settings."),
    "model without weights": (model_without_weights, ("demo", "model.path=./model"), "Model folder './model' has no weights (*.safetensors)."),
    "unknown recipe": (nothing, ("gsm8k_step",), "Unknown recipe 'gsm8k_step'. Did you mean 'gsm8k_steps'?"),
    "recipe that is not there": (nothing, ("mine.yaml",), "Recipe file mine.yaml cannot be read: No such file or directory."),
    "unknown agent of a workflow": (nothing, ("demo", "workflow.name=solo", "workflow.agent=acter"), "workflow.agent names the unknown agent 'acter'. Did you mean 'actor'?"),
    "unknown agent in a prompt": (nothing, ("demo", "team.agents.1.prompt='{reasoning}'"), "The prompt of agent 'actor' uses {reasoning}"),
    "unknown agent of an environment": (nothing, ("demo", "environment.flaws={reasonr: 0.5}"), "environment.flaws names the unknown agent 'reasonr'. Did you mean 'reasoner'?"),
    "algorithm for one policy": (nothing, ("demo", "algorithm.name=ppo"), "algorithm.name: ippo"),
    "a setting of another algorithm": (pennies, ("pennies.yaml", "algorithm.name=at_grpo"), "Set `algorithm.team_reward: individual`.\n"),
    "nothing to train": (nothing, ("demo", "team.sharing=frozen"), "No agent of this team is trained."),
    "adapter without a place": (nothing, ("demo", "team.lora.targets=[q_prj]"), "`lora.targets` names 'q_prj', no linear layer of this model below its output head. Did you mean 'q_proj'?"),
    "prompt beyond the context": (nothing, ("demo", "model.embedded.context=16", "team.agents.0.system=You are a careful helper."), "The prompt of agent 'reasoner' for task train-0 has"),
    "unknown key": (nothing, ("demo", "training.stpes=3"), "Unknown key 'training.stpes' (set on the command line). Did you mean 'steps'?"),
    "impossible value": (nothing, ("demo", "training.steps=many"), "'training.steps' cannot be 'many' (set on the command line)"),
    "value without an end": (nothing, ("demo", "optimizer.lr=inf"), "'optimizer.lr' cannot be 'inf' (set on the command line): it must be a finite number."),
    "file as a model": (a_file, ("demo", "model.path=./weights.bin"), "'./weights.bin' is a file. A model is a folder"),
    "unknown environment": (nothing, ("demo", "environment.name=aritmetic"), "Unknown environment 'aritmetic'. Did you mean 'arithmetic'?"),
    "tracker that is not installed": (nothing, ("demo", "trackers=[{name: wandb}]"), "The tracker 'wandb' is not installed. Install it with: pip install 'kapelle[wandb]'"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["train", "validate"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_one_line_with_exit_code_2_before_anything_expensive(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, case: str, command: str
) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else there(name))
    prepare, words, problem = CASES[case]
    prepare()
    small = [word for word in TINY if not word.startswith(("algorithm.", "model.embedded.context"))]
    recipe, *settings = words
    said = kapelle(command, recipe, *(small if recipe == "demo" else []), *settings)
    assert said.code == 2
    assert said.err.startswith("kapelle: ")
    assert problem in said.err
    assert said.err.count("\n") == 1, "one line"
    assert not Path("runs").exists(), "a run that cannot begin leaves no folder"


def test_two_trainers_never_share_a_run_directory(kapelle: Kapelle, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    lock = RunLock(run / "lock")
    said = kapelle("train", "--resume", "run", "training.steps=4")
    lock.release()
    assert said.code == 2
    assert said.err.startswith(f"kapelle: run is in use by process {os.getpid()}")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("run")
def test_a_run_is_never_written_over(kapelle: Kapelle) -> None:
    said = kapelle("demo", *TINY, "--run-dir", "run")
    assert (said.code, said.err) == (
        2,
        "kapelle: run already holds a run. Continue it with --resume, or choose another --run-dir (in Python: `resume=True`, or another `run_dir`).\n",
    )


def full_after(bytes_left: int) -> Callable[[int, bytes], int]:
    """An `os.write` for a disk that has so many bytes left."""
    real = os.write
    left = [bytes_left]

    def write(descriptor: int, data: bytes) -> int:
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(data)
        return real(descriptor, data)

    return write


@pytest.mark.slow
@pytest.mark.parametrize("bytes_left", [0, 4_000, 12_000])
def test_a_full_disk_ends_a_run_with_one_line_and_all_that_was_saved(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, run: Path, bytes_left: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("kapelle.runtime.files.os.write", full_after(bytes_left))
        said = kapelle("train", "--resume", "run", "training.steps=4")
    assert said.code == 2
    assert "the disk is full" in said.err
    assert said.err.count("\n") == 1
    newest = newest_valid(run / "checkpoints")
    assert newest.folder is not None
    assert newest.rejected == ()
    resumed = kapelle("train", "--resume", "run", "training.steps=4", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 4


def test_a_cache_that_cannot_be_written_is_found_before_the_warm_up(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("not a folder")
    monkeypatch.setenv("KAPELLE_CACHE", "file/cache")
    monkeypatch.setattr(
        "kapelle.features.warmup.stage.train_stage", lambda *_: pytest.fail("the warm-up begins")
    )
    said = kapelle("demo", *TINY, "--run-dir", "run")
    assert said.code == 2
    assert said.err.startswith(
        "kapelle: The warmed-up model cannot be saved in file/cache/warmup: Not a directory."
    )
    assert "set KAPELLE_CACHE" in said.err
