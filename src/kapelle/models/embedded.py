"""The model that kapelle makes itself: Qwen3 architecture, about a million weights, bytes as tokens.

It is a real causal language model, only tiny and untrained: initialised from a seed and warmed up on
scripted demonstrations, it lets every algorithm run on a laptop without a download. Its tokeniser has one
token per byte, so any text can be read, and one token for each role, so conversations stay short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kapelle.settings.schema import EmbeddedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Return a tokeniser with the 256 bytes and a handful of special tokens, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(config: EmbeddedConfig, vocabulary: int, end_id: int, pad_id: int) -> PreTrainedModel:
    """Return an untrained Qwen3 causal LM (2505.09388) whose weights depend on `config` alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.hidden // config.heads,
                max_position_embeddings=config.context,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                tie_word_embeddings=True,
                # The usual 0.02 is made for wide models; in a narrow one it hides every input at first.
                initializer_range=0.7 * config.hidden**-0.5,
                bos_token_id=None,
                eos_token_id=end_id,
                pad_token_id=pad_id,
            )
        )
