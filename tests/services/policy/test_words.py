from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kapelle.services.policy.agents import AnswerStream, TextStream
from kapelle.services.policy.speech import SpeechForm


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
    words, sent, place = TextStream(spoken, stops), "", 0
    for size in sizes:
        if any(stop in ids[: place + size].decode("utf-8", "replace") for stop in stops):
            break
        sent += words.add(ids[place : place + size])
        place += size
        assert text.startswith(sent), "sent text never changes"
    assert sent + words.rest(text) == text


def test_a_tool_call_is_not_streamed_in_pieces() -> None:
    words = AnswerStream(TextStream(spoken), SpeechForm())
    assert words.add(b"I call <tool_") == ("", "I call")
    assert words.add(b"box> and <tool_call>{") == ("", " <tool_box> and")
    assert words.add(b"}") == ("", "")
    text = "I call <tool_box> and <tool_call>{}"
    assert words.rest(*SpeechForm().read(text)[:2]) == ("", " <tool_call>{}"), "it breaks the form"
