"""A tokeniser without transformers, for checks before a model loads, and how many tokens a model can read.

transformers reads the files of some model families in its own way. So what a run samples and learns from comes from the
tokenisers of transformers alone. This one counts tokens, and returns None for a folder that needs more than it supports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.models import embedded
from kapelle.types import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Settings of `transformers` that say how many positions there are: rows of a table (GPT-2, OPT), or what was trained."""

WITHOUT_LIMIT = 10**30
"""Stands in `tokenizer_config.json` for a tokeniser that knows no limit."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that chat templates may name."""


class LightTokenizer:
    """Texts as tokens, and conversations as texts."""

    def __init__(
        self,
        name: str,
        raw: Tokenizer,
        chat_template: str,
        added: Mapping[int, object],
        named: Mapping[str, str],
    ) -> None:
        """Take the vocabulary, the template, the tokens `added` to the vocabulary and the special tokens by their names.

        Raises what jinja2 raises for a template that it cannot read.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.name_or_path = name
        self.backend_tokenizer = raw
        self.chat_template = chat_template
        self.added_tokens_decoder = added
        self._named = named
        end = named.get("eos_token")
        self.eos_token_id: int | None = None if end is None else raw.token_to_id(end)
        """The token that ends a turn."""
        # With what transformers offers to templates.
        around = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def plain(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **how)

        around.filters["tojson"] = plain
        around.globals["raise_exception"] = refuse
        around.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does
        self._template = around.from_string(chat_template)

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: Any = None,
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **arguments: Json,
    ) -> str:
        """Return a conversation as text."""
        assert not tokenize, "the renderer tokenises by itself"
        given = {"tools": tools, "documents": None, **self._named, **arguments}
        rendered = self._template.render(
            messages=conversation, add_generation_prompt=add_generation_prompt, **given
        )
        return str(rendered)

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> Mapping[str, list[int]]:
        """Return a text's token ids as `input_ids`."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return tokens as text."""
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def end_tokens(*settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that these settings of a model name as ends of a text."""
    found = [each.get("eos_token_id") for each in settings]
    return frozenset(
        k for each in found for k in (each if isinstance(each, list) else [each]) if isinstance(k, int)
    )


def read_folder(folder: Path) -> tuple[LightTokenizer, int, int | None, frozenset[int]] | None:
    """Return the tokeniser of a model's folder, the tokens that the model reads, how many have an embedding, and which end a text.

    None where the files do not say all of it; the number of embeddings may be unknown.
    """
    from jinja2 import TemplateError
    from tokenizers import Tokenizer

    try:
        written = [
            json.loads((folder / name).read_text("utf-8"))
            for name in ("tokenizer_config.json", "config.json")
        ]
        if not all(isinstance(each, dict) for each in written):
            return None
        settings, model = written
        file = folder / "chat_template.jinja"
        template = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
        # One of several templates would have to be chosen, and `rope_scaling` is a form of before, which transformers converts.
        inner = model.get("text_config", model)
        several = not isinstance(template, str) or (folder / "additional_chat_templates").exists()
        if several or inner.get("rope_scaling"):
            return None
        context = context_in(inner, settings.get("model_max_length", WITHOUT_LIMIT), by_class=True)
        if context is None:
            return None
        try:
            raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # noqa: BLE001 - the boundary to the library, whose errors are plain Exceptions
            return None
        named = {
            name: str(found["content"] if isinstance(found, Mapping) else found)
            for name in NAMES
            if (found := settings.get(name))
        }
        added = raw.get_added_tokens_decoder()
        generation = folder / "generation_config.json"
        ends = end_tokens(
            model, inner, json.loads(generation.read_text("utf-8")) if generation.is_file() else {}
        )
        light = LightTokenizer(str(folder), raw, template, added, named)
        return light, context, inner.get("vocab_size"), ends
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, TemplateError):
        return None  # transformers says what is wrong, or reads it


def context_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens of prompt and completion together.

    A model whose angles of positions change for the whole batch with its longest text (`longrope`) reads as many as leave
    them alone: beyond, a token's log-prob would depend on its neighbours in a batch.
    """
    found = context_in(config.get_text_config().to_dict(), tokenizer.model_max_length)
    assert found is not None, "the tokeniser has a limit"
    return found


def context_in(settings: Mapping[str, Any], most: int, *, by_class: bool = False) -> int | None:
    """Return the same of settings as they are written, of a tokeniser that reads at most `most` tokens.

    None if they name no limit and one that is not written is known `by_class`, as in a `config.json`.
    """
    limits = [settings.get(key) for key in LIMITS]
    if by_class and not any(limits):
        return None
    # Rotary positions, of all layers or by kind of layer, may have angles that change with the length.
    found, original = settings.get("rope_parameters") or {}, "original_max_position_embeddings"
    ropes = (found, *(each for each in found.values() if isinstance(each, Mapping)))
    changing = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    limits += [rope.get(original, settings.get(original)) for rope in changing]
    return int(min(limit for limit in (*limits, most) if limit))


def light_tokenizer(*, sees: bool = False) -> LightTokenizer:
    """Return the same tokeniser as `embedded.build_tokenizer`'s, without transformers."""
    raw = embedded.byte_tokenizer()
    special = [*embedded.SPECIAL, *embedded.EYES] if sees else [*embedded.SPECIAL]
    raw.add_special_tokens(special)
    template = embedded.SEEING_TEMPLATE if sees else embedded.CHAT_TEMPLATE
    known = {number: token for token in special if (number := raw.token_to_id(token)) is not None}
    return LightTokenizer("", raw, template, known, {"eos_token": embedded.END})
