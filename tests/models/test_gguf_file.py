"""Models in GGUF files: the file that a user of llama.cpp has is trained, exported and read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import kapelle
from kapelle.errors import ModelError
from kapelle.models.language_model import load_language_model
from kapelle.models.paths import check_model_path
from kapelle.settings.schema import ModelConfig
from kapelle.training.exporting import export
from kapelle.training.observer import Silent

gguf = pytest.importorskip("gguf")

LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = ["<eos>", "<pad>", *LETTERS, "Ġ", "Ċ", "ab"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(file: Path) -> Qwen2ForCausalLM:
    """Write a tiny Qwen2 model as llama.cpp would, without a chat template, and return it."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen2ForCausalLM(config)
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    for name, tensor in model.state_dict().items():
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            stem = f"blk.{number}.{NAMES[part]}"
        else:
            stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
        writer.add_tensor(f"{stem}.{kind}", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KAPELLE_CACHE", str(folder / "cache"))
        write_gguf(folder / "tiny.gguf")
        yield folder / "tiny.gguf"


def test_the_file_and_its_folder_have_the_weights_that_were_written(file: Path) -> None:
    written = write_gguf(file.parent / "again.gguf")
    (file.parent / "again.gguf").unlink()
    for path in (file, file.parent):
        model = load_language_model(ModelConfig(path=str(path), chat_template="plain"))
        assert all(
            torch.equal(own, model.model.state_dict()[name]) for name, own in written.state_dict().items()
        )
    assert len(list((file.parent / "cache" / "gguf").iterdir())) == 1


def test_a_team_trains_on_it_and_transformers_reads_its_merged_export(file: Path, tmp_path: Path) -> None:
    kapelle.train(
        str(file),
        [{"question": letter} for letter in "abcdefgh"],
        lambda completion: float("a" in completion),
        ["writer", "editor"],
        chat_template_path="plain",
        max_completion_length=4,
        steps=1,
        run_dir=tmp_path / "run",
        observer=Silent(),
    )
    for each in export(tmp_path / "run", tmp_path / "out", "hf", Silent()):
        folder = tmp_path / "out" / each.folder
        AutoModelForCausalLM.from_pretrained(folder)
        said = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
        assert said == "User: a\n\nAssistant:"


@pytest.mark.parametrize(
    ("content", "named"), [(b"GGUX", "does not begin with"), (b"GGUF\x03\x00\x00\x00", "cannot be loaded")]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "damaged.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        load_language_model(ModelConfig(path=str(tmp_path / "damaged.gguf"), chat_template="plain"))


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="2 GGUF files"):
        check_model_path(str(tmp_path))
