"""A published model: what kapelle computes, trains, exports and serves equals transformers and PEFT.

`make test-real` fetches Gemma 3 270M first; without it these tests are skipped.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import yaml
from openai import OpenAI
from tests.models.test_families import alone
from tests.support.tiny import first_gradient, lora_policies, stir, train_engine, with_behaviour
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import Objective
from kapelle.models.adapters import named
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.lora_bank import layers_of
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import save_adapter
from kapelle.rows import Sample
from kapelle.runs.named_checkpoint import policy_folder
from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.settings.schema import ModelConfig
from kapelle.team import Lora
from kapelle.training.exporting import export
from kapelle.training.observer import Silent
from kapelle.training.trainer import Trainer
from kapelle.types import Message, Sampling, conversation

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build/real/gemma-3-270m-q4_k_m.gguf"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.is_file(), reason="`make test-real` fetches the model first"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

LORA = Lora(rank=4, alpha=8.0)
STORY = "The old lighthouse keeper counted the ships that passed in the fog. "
RECIPE = {
    "model": {"path": "models/gemma/model.gguf", "chat_template": "plain"},
    "team": {
        "lora": {"rank": 4},
        "sampling": {"max_tokens": 4},
        "agents": [{"name": "reader"}, {"name": "judge"}],
    },
    "environment": {
        "name": "rewarded",
        "path": "rows.jsonl",
        "test_share": 0.5,
        "rewards": [{"function": "reward.py:short"}],
    },
    "workflow": {"name": "chain"},
    "algorithm": {"name": "grpo", "group_size": 2},
    "optimizer": {"lr": 1e-3},
    "training": {"tasks_per_step": 1},
    "evaluation": {"problems": 1, "before_and_after": False},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_language_model(ModelConfig(path=str(FILE), chat_template="plain"))


@pytest.fixture(scope="module")
def bare(model: LanguageModel) -> PreTrainedModel:
    """The same weights, without kapelle's adapters."""
    copied: PreTrainedModel = copy.deepcopy(model.model)
    return copied


def tokens(model: LanguageModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer(text)["input_ids"])


def test_texts_longer_than_the_window_have_the_log_probs_of_transformers(
    model: LanguageModel, bare: PreTrainedModel
) -> None:
    text = tokens(model, STORY * 45)[:640]
    engine = train_engine(lora_policies("long", lora=LORA), models={"base": model}, stirred=False)
    [found_T] = engine.score([Sample("long", text, tuple(range(1, len(text))))])
    with torch.no_grad():
        logits_LV = bare(input_ids=torch.tensor([text])).logits[0, :-1]
    expected_T = logits_LV.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(found_T, expected_T, atol=1e-4, rtol=0.0)


def test_a_prompt_of_several_lines_has_the_token_ids_of_transformers(model: LanguageModel) -> None:
    messages = [Message("user", "Meaning: To go\nsomewhere.\n\nIs it positive?"), Message("assistant", " no")]
    said = [*messages, Message("user", "\tWhy?\n")]
    text = model.tokenizer.apply_chat_template(conversation(said), tokenize=False, add_generation_prompt=True)
    assert ChatRenderer(model.tokenizer, 4096).start(said) == tuple(
        model.tokenizer(text, add_special_tokens=False)["input_ids"]
    )


def test_the_likeliest_tokens_are_those_of_generate(model: LanguageModel, bare: PreTrainedModel) -> None:
    prompts = [tokens(model, text) for text in ("Berlin is the capital of", STORY * 2, "1, 2, 3, 4,")]
    greedy = Sampling(max_tokens=12, temperature=0.0)
    outputs = decode(model, [Job(None, prompt, greedy, k) for k, prompt in enumerate(prompts)])
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = bare.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)  # type: ignore[operator]
        assert output.ids == theirs[0, len(prompt) :].tolist()


def test_adapters_learn_by_the_gradient_of_peft(
    model: LanguageModel, bare: PreTrainedModel, tmp_path: Path
) -> None:
    engine = train_engine(lora_policies("a", lora=LORA), models={"base": model}, stirred=False)
    stir(model.bank.parameters("a"), 0, 0.02)
    text = tokens(model, STORY)
    places = tuple(range(4, len(text)))
    advantage_T = torch.randn(len(places), generator=torch.Generator().manual_seed(0))
    samples = with_behaviour(engine, [Sample("a", text, places, {"advantage": advantage_T})])
    save_adapter(tmp_path, engine.weights("a"), named(layers_of(model.model), LORA), "gemma")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(bare), str(tmp_path), is_trainable=True).eval()
    logits_LV = theirs(input_ids=torch.tensor([text])).logits[0, [place - 1 for place in places]]
    logp_T = logits_LV.log_softmax(-1).gather(1, torch.tensor(text)[list(places), None])[:, 0]
    torch.testing.assert_close(alone(model, Job("a", text[:4], Sampling(), 0), list(text[4:])), logp_T)
    (-(logp_T * advantage_T).sum()).backward()
    engine.update(samples, Objective(SurrogateConfig().build()))
    found = torch.cat([gradient.flatten() for _, gradient in sorted(first_gradient(engine, "a").items())])
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected = torch.cat([gradient.flatten() for _, gradient in sorted(grads.items())])
    assert found.shape == expected.shape
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 1 - 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    (folder / "models/gemma").mkdir(parents=True)
    (folder / "models/gemma/model.gguf").symlink_to(FILE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    rows = [
        f'{{"question": "Name a {thing}."}}\n'
        for thing in ("city", "colour", "bird", "tree", "river", "tool")
    ]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text("def short(completion):\n    return 1 / (1 + len(completion))\n")
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kapelle", "train", *words]


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run of two steps."""
    words = command("recipe.yaml", "training.steps=2", "--run-dir", "whole")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def test_a_killed_run_resumes_to_the_same_weights(folder: Path, run: Path) -> None:
    words = command("recipe.yaml", "training.steps=2", "checkpoint.every=1", "--run-dir", "killed")
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (folder / "killed/checkpoints/00000001").is_dir():
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    subprocess.run(command("--resume", "killed"), cwd=folder, capture_output=True, check=True)
    for name in ("reader", "judge"):
        files = [policy_folder(folder / r / "checkpoints/00000002", name) for r in ("whole", "killed")]
        whole, resumed = ((each / "adapter_model.safetensors").read_bytes() for each in files)
        assert whole == resumed


def test_transformers_and_peft_read_exports_with_the_same_log_probs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    merged = export(run, tmp_path / "hf", "hf", Silent())
    adapters = export(run, tmp_path / "peft", "peft", Silent())
    for whole, adapter in zip(merged, adapters, strict=True):
        place = tmp_path / "hf" / whole.folder
        tokenizer = AutoTokenizer.from_pretrained(place)
        ids = torch.tensor([tokenizer(STORY)["input_ids"]])
        one = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        own = tmp_path / "peft" / adapter.folder
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "peft" / "base", dtype=torch.float32)
        other = peft.PeftModel.from_pretrained(base, str(own)).eval()
        with torch.no_grad():
            found, expected = (each(input_ids=ids).logits.log_softmax(-1) for each in (one, other))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0.0)


def test_a_served_agent_answers_openais_client(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    with (
        Trainer.from_run(str(run), observer=Silent()) as trainer,
        serve_policy(trainer.setup, "duo", Binding(), ServingLimits(), None) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120.0) as client,
    ):
        answer = client.chat.completions.create(
            model="reader", messages=[{"role": "user", "content": "Name a colour."}], max_tokens=4
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4
    assert answer.choices[0].finish_reason in ("stop", "length")
