"""A tokeniser that does not need transformers, for checks before a model is loaded, and the context length of a model.

transformers has special code for the files of some model families, so runs always use the tokenisers of transformers.
The tokeniser in this module only counts tokens before a model is loaded, and does not support every folder.
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
"""Settings of `transformers` for the number of positions: the size of a position table (GPT-2, OPT) or the trained
length."""

WITHOUT_LIMIT = 10**30
"""The value in `tokenizer_config.json` of a tokeniser without a length limit."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that chat templates may refer to by name."""


class LightTokenizer:
    """A tokeniser that converts strings to tokens and conversations to strings."""

    def __init__(
        self,
        name: str,
        raw: Tokenizer,
        chat_template: str,
        added: Mapping[int, object],
        named: Mapping[str, str],
    ) -> None:
        """Create a tokeniser from a vocabulary, a chat template, the added tokens and the special tokens by name.

        Raises the exception of jinja2 if the template is invalid.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.name_or_path = name
        self.backend_tokenizer = raw
        self.chat_template = chat_template
        self.response_template: Json = None
        """The model's description of its answers, as in transformers, or None if the model has no such description."""
        self.added_tokens_decoder = added
        self._named = named
        end = named.get("eos_token")
        self.eos_token_id: int | None = None if end is None else raw.token_to_id(end)
        """The id of the token that ends a turn, or None."""
        # Templates get the same filters and functions as from transformers.
        around = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def plain(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **how)

        around.filters["tojson"] = plain
        around.globals["raise_exception"] = raise_exception
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
        """Return a conversation as a string."""
        assert not tokenize, "the renderer tokenises by itself"
        given = {"tools": tools, "documents": None, **self._named, **arguments}
        rendered = self._template.render(
            messages=conversation, add_generation_prompt=add_generation_prompt, **given
        )
        return str(rendered)

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> Mapping[str, list[int]]:
        """Return the token ids of a string under the key `input_ids`."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the string that the token ids stand for."""
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def end_tokens(*settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens (`eos_token_id`) that the settings of a model contain."""
    found = [each.get("eos_token_id") for each in settings]
    return frozenset(
        k for each in found for k in (each if isinstance(each, list) else [each]) if isinstance(k, int)
    )


def read_folder(
    folder: Path, template: str | None = None
) -> tuple[LightTokenizer, int, int | None, frozenset[int]] | None:
    """Return the tokeniser of a folder, the context length, the number of embeddings (None if unknown) and the end tokens.

    A `template` replaces the chat template of the folder. Returns None if the files do not define everything that is
    needed.
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
        several = False
        if template is None:
            file = folder / "chat_template.jinja"
            template = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
            several = not isinstance(template, str) or (folder / "additional_chat_templates").exists()
        # transformers chooses between several templates, and converts the older form `rope_scaling`.
        inner = model.get("text_config", model)
        if template is None or several or inner.get("rope_scaling"):
            return None
        context = context_in(inner, settings.get("model_max_length", WITHOUT_LIMIT), by_class=True)
        if context is None:
            return None
        try:
            raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # noqa: BLE001 - the library raises plain Exceptions
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
        light.response_template = settings.get("response_template")
        return light, context, inner.get("vocab_size"), ends
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, TemplateError):
        return None  # transformers reads it, or reports the fault


def context_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum number of tokens of a prompt and its completion together.

    With `longrope`, a sequence beyond the original length changes the rotary angles of its whole batch, so the log-prob
    of a token would depend on other rows. The limit is therefore the original length.
    """
    found = context_in(config.get_text_config().to_dict(), tokenizer.model_max_length)
    assert found is not None, "the tokeniser has a limit"
    return found


def context_in(settings: Mapping[str, Any], most: int, *, by_class: bool = False) -> int | None:
    """Return the context length like `context_of`, but take the settings as a mapping and the tokeniser's maximum length `most`.

    Returns None if `by_class` is set and the settings contain no limit, because the class then has a default that a
    `config.json` may omit.
    """
    limits = [settings.get(key) for key in LIMITS]
    if by_class and not any(limits):
        return None
    # There may be one set of rotary parameters, or one for each kind of layer.
    found, original = settings.get("rope_parameters") or {}, "original_max_position_embeddings"
    ropes = (found, *(each for each in found.values() if isinstance(each, Mapping)))
    changing = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    limits += [rope.get(original, settings.get(original)) for rope in changing]
    return int(min(limit for limit in (*limits, most) if limit))


def light_tokenizer(*, sees: bool = False) -> LightTokenizer:
    """Return the tokeniser of `embedded.build_tokenizer` without using transformers."""
    raw = embedded.byte_tokenizer()
    special = [*embedded.SPECIAL, *embedded.EYES] if sees else [*embedded.SPECIAL]
    raw.add_special_tokens(special)
    template = embedded.SEEING_TEMPLATE if sees else embedded.CHAT_TEMPLATE
    known = {number: token for token in special if (number := raw.token_to_id(token)) is not None}
    return LightTokenizer("", raw, template, known, {"eos_token": embedded.END})
