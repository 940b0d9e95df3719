from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kapelle.services.policy.agents import SpeechStream, TextStream
from kapelle.services.policy.speech import Speech, SpeechForm


def spoken(ids: Sequence[int]) -> str:
    """Bytes as tokens: a character may take several."""
    return bytes(ids).decode("utf-8", "replace")


@given(
    st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60), st.sampled_from([(), ("stop",), ("é!",)])
)
def test_pieces_are_whole_characters_and_make_the_text(
    text: str, sizes: list[int], stops: tuple[str, ...]
) -> None:
    ids = text.encode("utf-8", "replace")
    text = ids.decode()
    for stop in stops:
        text = text.partition(stop)[0]
    words, told, place = TextStream(spoken, stops), "", 0
    for size in sizes:
        if any(stop in ids[: place + size].decode("utf-8", "replace") for stop in stops):
            break
        told += words.hear(ids[place : place + size])
        place += size
        assert text.startswith(told), "nothing is taken back"
    assert told + words.end(text) == text


def test_a_call_is_not_told_in_pieces() -> None:
    words = SpeechStream(TextStream(spoken), SpeechForm())
    assert words.hear(b"I call <tool_") == ("", "I call")
    assert words.hear(b"box> and <tool_call>{") == ("", " <tool_box> and")
    assert words.hear(b"}") == ("", "")
    text = "I call <tool_box> and <tool_call>{}"
    assert words.end(SpeechForm().read(text)) == ("", " <tool_call>{}"), "it breaks the form"


def test_spaces_wait_for_the_word_behind_them() -> None:
    """Before a call they are no part of the words."""
    words = SpeechStream(TextStream(spoken), SpeechForm())
    assert words.hear(b" I call ") == ("", " I call")
    assert words.hear(b"\nit <tool_call>{") == ("", " \nit")
    assert words.end(Speech("", " I call \nit", ())) == ("", "")
    words = SpeechStream(TextStream(spoken), SpeechForm())
    assert words.hear(b"No. \n") == ("", "No.")
    assert words.end(Speech("", "No. \n", ())) == ("", " \n"), "an answer that calls nothing has them"
