"""Conversations as tokens: the next prompt is the last one, the very ids that were sampled, and the rest."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny import tiny_model
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kapelle.errors import ModelError
from kapelle.models.embedded import SPECIAL, build_tokenizer
from kapelle.models.light_tokenizer import LightTokenizer, light_tokenizer
from kapelle.models.renderer import ChatRenderer, light_renderer, load_renderer
from kapelle.settings.schema import ModelConfig
from kapelle.types import Message, conversation

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' + m['content'] | trim"
    " + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
TURNS = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] | replace('assistant', 'model') + '\n'"
    " + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEFAULTS = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
"""A template that opens every conversation with words of its own."""


def test_a_folder_without_a_tokeniser_is_reported(tmp_path: Path) -> None:
    # transformers makes a tokeniser of one special token for it.
    tiny_model().model.save_pretrained(tmp_path)
    for load in (light_renderer, load_renderer):
        with pytest.raises(ModelError, match=f"The folder '{tmp_path}' has no tokeniser: tokenizer.json, or"):
            load(str(tmp_path), ModelConfig())


def tokenizer(template: str, end: str, *special: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, with a template and special tokens as some family of models has them."""
    made = build_tokenizer(512)
    made.add_special_tokens({"additional_special_tokens": [*special, end]})
    made.add_special_tokens({"eos_token": special[-1] if special and special[-1].startswith("<eos") else end})
    made.chat_template = template
    return made


FAMILIES = {
    "embedded": (build_tokenizer(512), "<|end|>"),
    "chatml": (tokenizer(CHATML, "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "headers": (tokenizer(HEADERS, "<|eot|>", "<|begin|>", "<|header|>", "<|/header|>"), "<|eot|>"),
    "own end": (tokenizer(TURNS, "<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>"), "<end_of_turn>"),
    "default system": (tokenizer(DEFAULTS, "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
}
"""Each with the token that ends a turn; in "own end" it is not the tokeniser's end of text."""

OPENING = [Message("system", "Be brief."), Message("user", "2+2?\nSay it.")]
HEARD = [Message("user", "No — again: 3+3?")]


def whole(tokens: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """A conversation as the template itself writes it, tokenised at once."""
    text = tokens.apply_chat_template(conversation(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokens(text, add_special_tokens=False)["input_ids"])


def ids(tokens: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokens(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[PreTrainedTokenizerFast, str]:
    return FAMILIES[request.param]


class TestFamilies:
    def test_a_conversation_starts_as_the_template_writes_it(
        self, family: tuple[PreTrainedTokenizerFast, str]
    ) -> None:
        tokens, _ = family
        assert ChatRenderer(tokens, 512).start(OPENING) == whole(tokens, OPENING)

    @pytest.mark.parametrize("opening", [OPENING, OPENING[1:]])
    def test_two_more_turns_equal_the_template_of_the_whole_conversation(
        self, family: tuple[PreTrainedTokenizerFast, str], opening: list[Message]
    ) -> None:
        tokens, end = family
        renderer = ChatRenderer(tokens, 512)
        prompt = renderer.start(opening)
        said = list(opening)
        for text in ("4", "six, I think"):
            completion = (*ids(tokens, text), *ids(tokens, end))
            following = renderer.extend(prompt, completion, HEARD)
            assert following[: len(prompt) + len(completion)] == (*prompt, *completion)
            said += [Message("assistant", text), *HEARD]
            assert following == whole(tokens, said)
            prompt = following

    def test_a_completion_cut_off_is_closed_by_the_template(
        self, family: tuple[PreTrainedTokenizerFast, str]
    ) -> None:
        tokens, end = family
        renderer = ChatRenderer(tokens, 512)
        prompt, completion = renderer.start(OPENING), ids(tokens, "four and some mo")
        following = renderer.extend(prompt, completion, HEARD)
        rest = following[len(prompt) + len(completion) :]
        assert rest[:1] == ids(tokens, end)
        assert following == whole(tokens, [*OPENING, Message("assistant", "four and some mo"), *HEARD])

    def test_received_messages_may_contain_any_text(
        self, family: tuple[PreTrainedTokenizerFast, str]
    ) -> None:
        tokens, end = family
        renderer = ChatRenderer(tokens, 512)
        prompt, completion = renderer.start(OPENING), (*ids(tokens, "4"), *ids(tokens, end))
        for nasty in (
            "\u2e28said\u2e29",
            "a \u2e28said\u2e29 b \u2e28said\u2e29",
            "{{ 7*7 }}",
            "\x00\ufffd☃",
        ):
            new_messages = [Message("user", nasty), Message("user", "and?")]
            expected = whole(tokens, [*OPENING, Message("assistant", "4"), *new_messages])
            assert renderer.extend(prompt, completion, new_messages) == expected


class TestSampledIds:
    def test_they_are_kept_where_text_would_tokenise_otherwise(self, data_folder: Path) -> None:
        packed = data_folder / "tokenizer_gpt2" / "tokenizer.json.gz"
        if not packed.is_file():
            pytest.skip(f"{packed} is missing")
        raw = Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())
        tokens = PreTrainedTokenizerFast(tokenizer_object=raw)
        tokens.add_special_tokens({"eos_token": "<|endoftext|>"})
        tokens.chat_template = (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|endoftext|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        )
        renderer = ChatRenderer(tokens, 1024)
        sampled = tuple(i for letter in " hello" for i in ids(tokens, letter))
        assert len(sampled) == 6
        assert ids(tokens, " hello") != sampled  # one token, said as one
        end = int(tokens.eos_token_id)
        prompt = renderer.start(OPENING)
        following = renderer.extend(prompt, (*sampled, end), HEARD)
        assert following[: len(prompt) + 7] == (*prompt, *sampled, end)
        # As text both are the same conversation.
        again = renderer.extend(prompt, (*ids(tokens, " hello"), end), HEARD)
        assert tokens.decode(list(following)) == tokens.decode(list(again))
        assert len(following) == len(again) + 5

    def test_bytes_that_are_not_text_are_kept(self) -> None:
        tokens, _ = FAMILIES["embedded"]
        renderer = ChatRenderer(tokens, 512)
        alphabet = {letter: number for letter, number in tokens.get_vocab().items() if len(letter) == 1}
        broken = (alphabet["Ã"], alphabet["("], alphabet["ł"])  # the bytes c3 28 9f: not UTF-8
        assert "\N{REPLACEMENT CHARACTER}" in tokens.decode(list(broken))
        prompt = renderer.start(OPENING)
        following = renderer.extend(prompt, broken, HEARD)
        assert following[len(prompt) : len(prompt) + 3] == broken


class TestRefusals:
    def test_a_tokeniser_without_a_chat_template(self) -> None:
        bare = build_tokenizer(64)
        bare.chat_template = None
        with pytest.raises(ModelError, match="chat_template: plain"):
            ChatRenderer(bare, 64)

    def test_a_template_that_drops_assistant_messages(self) -> None:
        forgetful = build_tokenizer(64)
        forgetful.chat_template = "{{ messages[-1]['content'] }}"
        renderer = ChatRenderer(forgetful, 64)
        with pytest.raises(ModelError, match="drops earlier assistant messages"):
            renderer.extend((1, 2), (3,), HEARD)


TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=6), max_size=5).map("".join)


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS), min_size=1, max_size=4
    )
)
def test_the_embedded_model_s_light_tokeniser_gives_the_ids_of_the_one_of_transformers(
    said: list[tuple[str, str]],
) -> None:
    light, whole = ChatRenderer(light_tokenizer(), 512), ChatRenderer(FAMILIES["embedded"][0], 512)
    messages = [Message(role, text) for role, text in said]
    assert light.start(messages) == whole.start(messages)
    assert light.completion(said[0][1]) == whole.completion(said[0][1])
    assert light.extend((3,), (70, 1), messages) == whole.extend((3,), (70, 1), messages)
    assert light.same_tokens(whole)


RICH = (
    "{{ bos_token }}{% for m in messages %}\n{% if m['role'] == 'nobody' %}{% continue %}{% endif %}\n"
    "{{ '<|im_start|>' + m['role'] }} {{ m | tojson }} {{ eos_token }}\n{% if loop.index > 9 %}"
    "{{ raise_exception('too long') }}{% endif %}{% endfor %}{% if tools %}T{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


class TestFolders:
    """A folder's tokeniser, read without transformers."""

    def save(self, folder: Path, made: PreTrainedTokenizerFast, **settings: object) -> None:
        model = tiny_model().model
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, safe_serialization=True)
        made.save_pretrained(folder)
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, "vocab_size": 300, **settings}))

    @pytest.mark.parametrize("family", [*FAMILIES, "rich"])
    def test_it_gives_the_ids_and_the_context_of_the_one_of_transformers(
        self, family: str, tmp_path: Path
    ) -> None:
        made = FAMILIES[family][0] if family in FAMILIES else tokenizer(RICH, "<|im_end|>", "<|im_start|>")
        if family == "rich":
            made.add_special_tokens({"bos_token": "<|im_start|>"})
        self.save(tmp_path, made)
        light, whole = (read(str(tmp_path), ModelConfig()) for read in (light_renderer, load_renderer))
        assert isinstance(light.tokenizer, LightTokenizer)
        assert light.start(OPENING) == whole.start(OPENING)
        assert light.context == whole.context
        assert light.same_tokens(whole)
        if family != "rich":
            assert light.completion("four") == whole.completion("four")
            assert light.extend((3,), (70, 1), HEARD) == whole.extend((3,), (70, 1), HEARD)


def test_the_bytes_of_a_token_of_a_byte_level_and_of_a_byte_fallback_vocabulary() -> None:
    from tokenizers import decoders, models

    level = build_tokenizer(64)
    euro = level("€", add_special_tokens=False)["input_ids"]
    assert [ChatRenderer(level, 64).bytes_of(token) for token in euro] == [b"\xe2", b"\x82", b"\xac"]
    words = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "a": 3}
    raw = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fallback = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<unk>", chat_template=CHATML)  # noqa: S106
    assert [ChatRenderer(fallback, 64).bytes_of(token) for token in (1, 2, 3)] == [b"\xe2", b"\x82", b"a"]
