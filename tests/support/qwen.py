"""Tiny random models in folders, as Qwen2.5 and Qwen3 ship them: their model type, byte-level tokens, ChatML and its end token.

The templates have the shape that the families document: Qwen2.5 adds a system message where a conversation has none, Qwen3
closes an empty thought where `enable_thinking` is false and drops the thoughts of answers before the last user message.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.tool_templates import QWEN

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
END = MARKS[-1]
DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CONTEXT = 2048
_QUIET = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
_LAST = "{%- set ns = namespace(last=0) %}{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{%- endfor %}"
_ANSWER = "<|im_start|>assistant\n{{ message.content }}"
_SHORT = "<|im_start|>assistant\n{{ message.content if loop.index0 > ns.last else message.content.split('</think>')[-1].lstrip('\\n') }}"
TEMPLATES = {
    "qwen2": QWEN.template.replace(
        "{% elif messages[0].role == 'system' %}",
        "{% elif messages[0].role != 'system' %}<|im_start|>system\n"
        + DEFAULT_SYSTEM
        + "<|im_end|>\n{% else %}",
        1,
    ),
    "qwen3": _LAST
    + QWEN.template.replace(_ANSWER, _SHORT).replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n" + _QUIET + "{% endif %}"
    ),
}


def save_qwen(folder: Path, family: str = "qwen3", seed: int = 0) -> str:
    """Write a tiny random model of `family` (`qwen2` or `qwen3`) with its tokeniser, and return the folder's path."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in MARKS])
    raw.add_tokens([AddedToken(each, special=False, normalized=False) for each in PLAIN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token=MARKS[0], model_max_length=CONTEXT
    )
    tokenizer.chat_template = TEMPLATES[family]
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(MARKS[0]),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)
