"""The heads of safetensors files, read without the library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from kapelle.errors import ModelError
from kapelle.models.adapters import shapes_of
from kapelle.models.weight_files import StoredTensor, read_head, stored_weights

TENSORS = {
    "a": torch.zeros(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 2, dtype=torch.float16),
    "d": torch.tensor(1),
    "e": torch.zeros(2, dtype=torch.float8_e4m3fn),
}


def test_names_types_and_shapes_are_those_of_the_library(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = stored_weights(tmp_path)
    assert {name: tensor.shape for name, tensor in found.items()} == shapes_of(tmp_path)
    assert found["b"] == StoredTensor("BF16", (5,))
    assert found["d"] == StoredTensor("I64", ())


@given(st.binary(max_size=200) | st.integers(0, len(save(TENSORS)) - 1).map(lambda n: save(TENSORS)[:n]))
@settings(max_examples=40, deadline=None)
def test_whatever_a_file_holds_it_is_whole_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("f") / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_head(file)


def head(listed: object, rest: bytes = b"") -> bytes:
    text = json.dumps(listed).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "data",
    [
        head([]),
        head({"a": 3}),
        head({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        head({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}, bytes(4)),
        head({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)),
        struct.pack("<Q", 1 << 62),
    ],
)
def test_a_head_that_lies_is_rejected(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError):
        stored_weights(tmp_path)


def test_shards_lie_in_the_folder(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "s.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "s.safetensors")}))
    assert stored_weights(tmp_path).keys() == TENSORS.keys()
    for listed in ({"a": "../s.safetensors"}, {"a": "t.safetensors"}, {"z": "s.safetensors"}, {}, {"a": 3}):
        index.write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(ModelError):
            stored_weights(tmp_path)
