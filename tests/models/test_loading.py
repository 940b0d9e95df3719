"""Loading a model: exactly what its files hold, in the type asked for, with hardly more memory than its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny import same_bits, tiny_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from kapelle.errors import ModelError
from kapelle.models.embedded import build_tokenizer
from kapelle.models.language_model import load_language_model
from kapelle.models.weights import save_model
from kapelle.settings.schema import ModelConfig

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    model.model.save_pretrained(tmp_path / "m")
    model.tokenizer.save_pretrained(tmp_path / "m")  # not sealed: as someone else has saved it
    return tmp_path / "m"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class TestWhatTheFilesHold:
    def test_a_weight_that_is_missing_is_not_drawn_at_random(self, folder: Path) -> None:
        rewrite(folder, lambda tensors: tensors.pop(LAYER))
        with pytest.raises(ModelError, match=rf"no weights for '{LAYER}' of Qwen3ForCausalLM"):
            load_language_model(ModelConfig(path=str(folder)))

    def test_layers_beyond_the_settings_are_rejected(self, folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        settings |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(
            ModelError, match=r"'model.layers.1.\w+\.\S+' and \d+ more that Qwen3ForCausalLM does not use"
        ):
            load_language_model(ModelConfig(path=str(folder)))

    def test_a_weight_of_another_shape_is_named(self, folder: Path) -> None:
        rewrite(folder, lambda tensors: tensors.update({LAYER: torch.zeros(3, 5)}))
        with pytest.raises(
            ModelError, match=rf"'{LAYER}' of shape \(3, 5\), but Qwen3ForCausalLM needs \(32, 16\)"
        ):
            load_language_model(ModelConfig(path=str(folder)))

    def test_tied_weights_may_be_saved_once_or_twice(self, folder: Path) -> None:
        model = load_language_model(ModelConfig(path=str(folder)))
        assert model.model.config.tie_word_embeddings
        rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        again = load_language_model(ModelConfig(path=str(folder)))
        assert again.model.get_output_embeddings().weight is again.model.get_input_embeddings().weight
        assert same_bits(again.base_parameters(), model.base_parameters())

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_shards_are_one_model(self, dtype: str, tmp_path: Path) -> None:
        model = tiny_model()
        model.tokenizer.save_pretrained(tmp_path)
        model.model.save_pretrained(tmp_path, max_shard_size="8KB")
        assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
        whole = tmp_path / "whole"
        save_model(whole, model)
        one, other = (
            load_language_model(ModelConfig.model_validate({"path": str(p), "dtype": dtype}), trained=False)
            for p in (whole, tmp_path)
        )
        assert same_bits(one.base_parameters(), other.base_parameters())
        next(tmp_path.glob("model-00002-*")).unlink()
        with pytest.raises(ModelError, match="model-00002"):
            load_language_model(ModelConfig(path=str(tmp_path)))


PROBE = """
import sys, threading, time
from kapelle.models.language_model import load_language_model
from kapelle.settings.schema import ModelConfig

def held():
    "Bytes of this process's own memory: what files are mapped to is the page cache's, and given back when needed."
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

kept = [load_language_model(ModelConfig(path=sys.argv[-1], dtype="bfloat16"), trained=False)]  # it imports
for path in sys.argv[1:]:
    before, most, loaded = held(), [0], threading.Event()
    def watch():
        while not loaded.wait(0.001):
            most.append(held())
    watching = threading.Thread(target=watch)
    watching.start()
    model = load_language_model(ModelConfig(path=path, dtype="bfloat16"), trained=False)
    loaded.set()
    watching.join()
    weights = sum(p.numel() * p.element_size() for p in model.base_parameters().values())
    print((max(most) - before) / weights)
    kept.append(model)  # or the next one would take its place
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_peak_is_the_weights_and_a_tenth(tmp_path: Path) -> None:
    """Read from float32, whole and in shards, and from the same type."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}
    tokenizer = build_tokenizer(64)
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, vocab_size=len(tokenizer)))
    folders = [tmp_path / name for name in ("whole", "sharded", "same")]
    for folder, dtype, shard in zip(
        folders, ("float", "float", "bfloat16"), ("1GB", "20MB", "1GB"), strict=True
    ):
        getattr(model, dtype)().save_pretrained(folder, max_shard_size=shard)
        tokenizer.save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, folders)], capture_output=True, text=True, check=True
    )
    whole, sharded, same = map(float, done.stdout.split())
    assert max(whole, sharded) < 1.1
    assert min(whole, sharded) > 0.9, "weights of another type than the files' are in memory of their own"
    assert same < 0.2, "weights of the files' type are mapped, not copied"
