"""Weights as content: hashes, and adapters as folders that the reference implementation reads and writes."""

from __future__ import annotations

import base64
import copy
import hashlib
from pathlib import Path

import pytest
import torch
from tests.support.tiny import stir, tiny_model

from kapelle.errors import ModelError
from kapelle.models.adapters import named
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import read_adapter, save_adapter, weights_hash
from kapelle.runtime.tensors import copy_together
from kapelle.team import Lora

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TOKENS = torch.arange(6, 26).reshape(2, 10)
KINDS = [
    Lora(rank=2, alpha=4.0),
    Lora(rank=5, alpha=7.5, targets=("q_proj", "down_proj")),
    Lora(rank=1, alpha=1.0, targets=("gate_proj",), dropout=0.1),
]


class TestHash:
    def test_it_sees_every_name_shape_type_and_bit(self) -> None:
        base = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3)}
        other = [
            {"a": torch.tensor([1.0, 2.0]), "c": torch.zeros(2, 3)},
            {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(3, 2)},
            {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3, dtype=torch.int32)},
            {"a": torch.tensor([1.0, 2.0000002]), "b": torch.zeros(2, 3)},
            {"a": torch.tensor([2.0, 1.0]), "b": torch.zeros(2, 3)},
            {"a": torch.tensor([1.0, 2.0]), "b": -torch.zeros(2, 3)},
        ]
        hashes = {weights_hash(tensors) for tensors in [base, *other]}
        assert len(hashes) == 7

    def test_it_equals_plain_integers(self) -> None:
        tensors = {
            "b": torch.arange(-9, 10, dtype=torch.int16),
            "a": torch.linspace(-3, 3, 5, dtype=torch.float64),
            "c": torch.tensor(True),
            "none": torch.zeros(0, 4),
        }
        assert weights_hash(tensors) == by_plain_integers(tensors)
        assert weights_hash({}) == by_plain_integers({})


def by_plain_integers(tensors: dict[str, torch.Tensor]) -> str:
    """The definition of `weights_hash`, word by word."""
    header, content = "", b""
    for name in sorted(tensors):
        header += f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n"
        content += bytes(tensors[name].reshape(-1).view(torch.uint8).tolist())
        content += bytes(-len(content) % 8)
    total = 0
    for place in range(len(content) // 8):
        word = int.from_bytes(content[8 * place : 8 * place + 8], "little")
        word ^= place * 0x9E3779B97F4A7C15 % 2**64
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
            word = (word ^ word >> 32) * factor % 2**64
        total = (total + word) % 2**64
    found = hashlib.blake2b(header.encode() + total.to_bytes(8, "little"), digest_size=8).digest()
    return "v2-" + base64.b32encode(found).decode().lower().rstrip("=")


class TestAdapters:
    @pytest.mark.parametrize("lora", KINDS)
    @torch.no_grad()
    def test_peft_loads_ours_and_computes_the_same(self, lora: Lora, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = tiny_model()
        plain = copy.deepcopy(model.model)
        model.bank.add("agent", lora, seed=0)
        stir(model.bank.parameters("agent"), 5)
        save_adapter(
            tmp_path / "agent", model.bank.parameters("agent"), named(layers_of(plain), lora), "some/base"
        )
        theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "agent")).eval()
        with model.bank.routed([("agent", 0, 2)]):
            ours = model.model(input_ids=TOKENS, use_cache=False).logits
        expected = theirs(input_ids=TOKENS).logits
        assert float((ours - expected).abs().max()) < 1e-5
        with theirs.disable_adapter():
            assert float((ours - theirs(input_ids=TOKENS).logits).abs().max()) > 0.01

    def test_a_folder_that_is_none_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            ModelError,
            match="not a PEFT adapter folder",
        ):
            read_adapter(tmp_path / "nowhere")
        (tmp_path / "adapter_config.json").write_text("{")
        with pytest.raises(ModelError, match="not a PEFT adapter folder"):
            read_adapter(tmp_path)
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
        with pytest.raises(ModelError, match="not a PEFT adapter folder"):
            read_adapter(tmp_path)


def test_copies_on_the_cpu_are_of_the_same_bits_and_share_no_memory() -> None:
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(7, 5, generator=generator)
    tensors = {
        "strided": base.T,
        "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "itself": base,
    }
    copies = copy_together(tensors)
    assert list(copies) == list(tensors)
    for name, tensor in tensors.items():
        assert (copies[name].dtype, copies[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copies[name].nan_to_num(9.0), tensor.nan_to_num(9.0))
    places = [copy.untyped_storage().data_ptr() for name, copy in copies.items() if name != "none"]
    assert len(set(places)) == len(places)
    base[:] = 0
    assert float(copies["itself"].abs().min()) > 0
