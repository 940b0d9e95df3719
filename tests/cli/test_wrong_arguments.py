"""Wrong arguments of any command end with one line and exit code 2 before a model loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle
from tests.support.tiny import tiny_model

from kapelle.models.weights import save_model

pytest.importorskip("starlette")

ON_ARITHMETIC = ("eval", "--model", "embedded", "--environment", "arithmetic")
ANYWHERE = "0.0.0.0"  # noqa: S104 - what is tested
ENVIRONMENTS = ("serve", "environments", "--environments")
CASES: list[tuple[tuple[str, ...], str]] = [
    (("blame", "none"), "There is no kapelle run at none."),
    (("blame", "run", "--samples", "0"), "argument --samples: 0 is less than 1."),
    (("blame", "run", "optimizer.lr=1"), "'optimizer.lr=1' cannot be changed after training."),
    (("blame", "run", "--json", "there.json"), "there.json exists already."),
    (("blame", "run@9"), "has no complete checkpoint of step 9."),
    (("chat",), "Give one run directory"),
    (("chat", "nowhere"), "nowhere"),
    (("chat", "model", "--agent", "ada"), "--agent refers to the unknown agent 'ada'. Known: agent_0."),
    (("chat", "--model", "./gone"), "Model folder './gone' does not exist"),
    (("chat", "--model", "model", "runs/mine"), "--model and a run directory"),
    (("chat", "--environment", "demo"), "or a model: `kapelle chat --model PATH"),
    (("chat", "model", "team.samplin.max_tokens=4"), "Unknown key 'team.samplin'"),
    (("collect", "run", "--out", "a.jsonl", "--num-episodes", "9", "--tasks", "9"), "--tasks N --samples 1"),
    (("collect", "run", "--min-reward", "1"), "--out FILE"),
    (("collect", "run", "--for", "verifier", "--out", "a.jsonl", "--min-reward", "1"), "incorrect answers too"),
    (("collect", "run", "--no-balance", "--out", "a.jsonl"), "applies only to --for verifier"),
    (("compare", "demo", "--algorithms", "grpo", "--seeds", "x"), "argument --seeds"),
    (("demo", "gsm8k"), "kapelle train"),
    (("doctor", "--processes", "2"), "`--processes` needs `--launch`"),
    (("doctor", "--timeout", "0"), "`--timeout 0`: give a positive number of seconds"),
    (("doctor", "--address", "auto"), "are for a Ray cluster"),
    (("doctor", "--launch", "slurm"), "invalid choice: 'slurm'"),
    (("eval", "nowhere"), "There is no kapelle run at nowhere."),
    (("eval", "a", "b"), "Give one run directory"),
    (("eval", "run", "training.steps=9"), "'training.steps=9' cannot be changed after training."),
    (("eval", "run", "evaluation.problem=9"), "Unknown key 'evaluation.problem' .* Did you mean 'problems'?"),
    (("eval", "--model", "./m", "--environment", "arithmetic"), "Model folder './m' does not exist."),
    (("eval", "--model", "embedded", "--environment", "algebra,arithmatic"), "Did you mean 'arithmetic'?"),
    (("eval", "--model", "embedded", "--environment", "algebra,"), "--environment 'algebra,' has an empty name."),
    ((*ON_ARITHMETIC, "--output", "there.json"), "there.json exists already. Choose another --output"),
    ((*ON_ARITHMETIC, "--output", "no/folder/x.json"), "no/folder/x.json cannot be written"),
    ((*ON_ARITHMETIC, "--output", "results.csv"), "--output results.csv: use a name that ends in .json for one object"),
    ((*ON_ARITHMETIC, "--num-episodes", "0"), "argument --num-episodes/-n: 0 is less than 1."),
    (("exploit", "none"), "is not a run directory: it has no config.yaml"),
    (("exploit",), "Give one run directory"),
    (("export",), "Give one run directory"),
    (("export", "nowhere"), "nowhere"),
    (("export", "nowhere", "--merge", "--format", "peft"), "cannot be combined"),
    (("export", "nowhere", "--public"), "Add --push OWNER/NAME"),
    (("export", "nowhere@first"), "is not a checkpoint"),
    (("export", "nowhere", "--push", "../x/y", "--dry-run"), "--push must be a repository"),
    (("launch", "--slurm", "--kubernetes", "demo"), "Choose one scheduler"),
    (("launch", "--slurm", "demo", "--time", "0"), "less than a minute"),
    (("launch", "--slurm", "demo", "--name", "A b"), "--name 'A b'"),
    (("launch", "--slurm", "dmo"), "Did you mean 'demo'"),
    (("new", "enviroment", "mine"), "`kapelle new` cannot create 'enviroment'. Did you mean 'environment'?"),
    (("new", "workflow", "../there"), "is not a valid module name"),
    (("new", "algorithm", "class"), "'class' is already a name"),
    (("new", "project", "there"), "'there' already exists here"),
    (("runs", "rollback", "run"), "Give the step to go back to"),
    (("runs", "rollback", "run", "--to", "77"), "no checkpoint of step 77"),
    (("runs", "show", "run", "--to", "1"), "are for `kapelle runs rollback`"),
    (("runs", "show", "nowhere"), "no kapelle run at nowhere"),
    (("runs", "show", "rum"), "There is no kapelle run at rum. Did you mean 'run'?"),
    (("train", "--resume", "rum"), "There is no kapelle run at rum. Did you mean 'run'?"),
    (("serve",), "Give what to serve and a run directory"),
    (("serve", "polcy", "run"), "Did you mean 'policy'"),
    (("serve", "nowhere"), "'nowhere' is neither a run nor an exported team"),
    (("serve", "reward", "run", "--host", ANYWHERE), "TLS .* and a token"),
    (("serve", "policy", "run", "--port", "99999"), "port 99999"),
    (("serve", "policy", "run", "--timeout", "nan"), "--timeout"),
    (("serve", "environments"), "Name the environments to serve"),
    ((*ENVIRONMENTS, "arithmetik"), "Environment 'arithmetik': .*Did you mean 'arithmetic'"),
    ((*ENVIRONMENTS, "sums=arithmetic", "sum.digits=3"), "Did you mean 'sums'"),
    ((*ENVIRONMENTS, "arithmetic", "--host", ANYWHERE), "TLS .* and a token"),
    (("serve", "environments", "--replace", "arithmetic"), "--at localhost:50051"),
    (("serve", "tinker", "embedded", "optimizer.lr=1"), "is not a setting of the model"),
    (("serve", "tinker", "embedded", "model.dtyp=float16"), "Did you mean '.*dtype'"),
    (("serve", "tinker", "embedded", "--keys", "none"), "The file of keys none cannot be read"),
    (("train", "--resum"), "Did you mean '--resume'?"),
    (("train", "dmeo"), "Did you mean 'demo'?"),
    (("train", "demo", "--steps", "5"), "training.steps=VALUE"),
    (("train", "training.steps"), "training.steps"),
    (("train", "run"), "kapelle train --resume run"),
    (("train", "--resume"), "Give the run to resume: `kapelle train --resume RUN`."),
    (("train", "--resume", "nowhere"), "There is no kapelle run at nowhere."),
    (("train", "--resume", "--run-dir", "nowhere"), "There is no kapelle run at nowhere."),
    (("train", "demo", *TINY, "--resume"), "demo is a recipe, not a run."),
    (("train", "rows.jsonl"), "'rows.jsonl' is a data file."),
    (("train", "demo", "num_train_epochs=2", "--dry-run"), "(`num_train_epochs` is read as `training.epochs`.)"),
    (("train", "demo", *TINY, "--resume", "--run-dir", "nowhere"), "There is no run at nowhere to resume."),
    (("view", "nowhere"), "The folder nowhere does not exist"),
    (("view", ".", "--host", ANYWHERE), "needs TLS"),
    (("view", ".", "--prot", "1"), "Did you mean '--port'"),
]  # fmt: skip


@pytest.mark.usefixtures("no_model", "run")
@pytest.mark.parametrize(("words", "reason"), CASES, ids=[" ".join(words)[:50] for words, _ in CASES])
def test_wrong_arguments_end_with_one_line(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reason: str
) -> None:
    """A reason with `.*` is a regular expression."""
    monkeypatch.delenv("KAPELLE_TOKEN", raising=False)
    Path("there.json").write_text("precious")
    Path("there").mkdir()
    Path("rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n')
    if "model" in words:
        save_model(Path("model"), tiny_model())
    before = sorted(Path().iterdir())
    said = kapelle(*words)
    assert (said.code, said.err.count("\n")) == (2, 1), said
    assert reason in said.err if ".*" not in reason else re.search(reason, said.err), said.err
    assert sorted(Path().iterdir()) == before
    assert Path("there.json").read_text() == "precious"
