"""What loading a model would meet, found out without its weights: names and shapes of its files, and its output head.

For architectures that kapelle does not know itself. transformers reads the files' heads on torch's meta device; a small
random model of the same settings shows whether its logits are those that kapelle computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from kapelle.errors import KapelleError
from kapelle.models.embedded import build_tokenizer
from kapelle.models.language_model import CHECKED, LanguageModel
from kapelle.models.paths import check_loaded, loading, local_only

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MOST = 100_000_000
"""Parameters of the largest model that is made for a trial: 400 MB, about a second."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Settings of transformers that count layers."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Settings that are divided together, so that heads keep their width."""
WORDS = 512
"""Tokens of the vocabulary of a reduced model."""


def check_names(path: str) -> bool:
    """Raise ModelError unless a folder's files hold the weights that its settings describe; False where accelerate, which reads only the heads, is missing."""
    if find_spec("accelerate") is None:
        return False
    from transformers import AutoModelForCausalLM

    with loading(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=local_only(path),
        )
        model, found = loaded
        check_loaded(path, type(model).__name__, found)
    return True


def check_architecture(path: str) -> bool:
    """Raise ModelError where kapelle cannot compute a model's logits; False where no small model can be made of its settings."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with loading(path, "read"):
        local = local_only(path)
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=local)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local)
    for small in _smaller(settings):
        try:
            with torch.device("meta"):
                outline = AutoModelForCausalLM.from_config(copy.deepcopy(small), trust_remote_code=False)
            if sum(parameter.numel() for parameter in outline.parameters()) > MOST:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
        except Exception:  # noqa: BLE001, S112 - settings that do not go together raise anything
            continue
        try:
            own = tokenizer if small is settings else build_tokenizer(CHECKED)
            LanguageModel(model, own, name=path)
        except KapelleError:
            raise
        except Exception:  # noqa: BLE001, S112 - smaller settings may fit each other and no longer the model
            continue
        return True
    return False


def _smaller(settings: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield the settings as they are, then ever smaller ones of the same kinds of layers."""
    yield settings
    few = _with_few_layers(settings)
    yield few
    for share in (1, 8, 4, 2):
        small = copy.deepcopy(few)
        inner = small.get_text_config()
        for key in EXPERTS:
            if isinstance(getattr(inner, key, None), int):
                setattr(inner, key, max(4, int(getattr(inner, "num_experts_per_tok", None) or 0)))
        heads = [getattr(inner, key, None) for key in HEADS]
        if all(isinstance(size, int) and size % share == 0 for size in heads if size is not None):
            for key, size in zip(HEADS, heads, strict=True):
                if size is not None:
                    setattr(inner, key, size // share)
            yield small


def _with_few_layers(settings: PretrainedConfig) -> PretrainedConfig:
    """Return the settings with a short vocabulary and only as many layers as show every kind of them."""
    small = copy.deepcopy(settings)
    inner = small.get_text_config()
    count = next(key for key in (*LAYERS, "") if not key or isinstance(getattr(inner, key, None), int))
    layers = getattr(inner, count) if count else 0
    kinds = {
        key: value
        for key, value in inner.to_dict().items()
        if isinstance(value, list) and len(value) == layers and all(isinstance(kind, str) for kind in value)
    }
    enough = max([2, *(max(map(kind.index, kind)) + 1 for kind in kinds.values() if kind)])
    if enough < layers:
        for key, kind in kinds.items():
            setattr(inner, key, kind[:enough])
        setattr(inner, count, enough)
    if inner.vocab_size > WORDS:
        inner.vocab_size = WORDS
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(inner, name, None)
    return small
