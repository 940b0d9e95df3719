"""A tiny model folder whose chat template thinks by the rules of Qwen3's, and its tokeniser."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny import tiny_model
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from kapelle.models.embedded import build_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that are not special, as in Qwen3's tokeniser."""

THINKING = """{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set words = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thoughts) %}{{ '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}
{{- words }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
"""Thoughts stay behind the user's last message and go before it, as in Qwen3's template."""


def thinking_tokenizer(template: str = THINKING) -> PreTrainedTokenizerFast:
    """Return bytes as tokens, with the marks of Qwen3."""
    made = build_tokenizer(4096)
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.add_tokens([AddedToken(mark, normalized=False) for mark in PLAIN])
    made.add_special_tokens({"eos_token": "<|im_end|>"})
    made.chat_template = template
    return made


def thinking_folder(folder: Path, template: str = THINKING) -> Path:
    """Save a tiny model with such a template and return its folder."""
    model, tokenizer = tiny_model(context=1024).model, thinking_tokenizer(template)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
