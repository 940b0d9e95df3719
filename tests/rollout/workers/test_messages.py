"""What episode states and players say to each other arrives as it was, in pieces of any size, and errors keep their names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kapelle.errors import EpisodeError
from kapelle.rollout.workers.session import Frames, pack
from kapelle.runtime.process_tree import SharedStatus

SAID: list[dict[str, Any]] = [
    {"text": "é\x00\ud800", "empty": "", "list": [1, (2.5, None)], "keys": {1: True, "$tag": -0.0}},
    {"whole": 1 << 8000, "inf": -math.inf},
    {},
]


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_messages_arrive_as_they_were(size: int) -> None:
    frames, sent = Frames(), b"".join(map(pack, SAID))
    arrived = [m for at in range(0, len(sent), size) for m in frames.feed(sent[at : at + size])]
    assert arrived == SAID
    assert type(arrived[0]["list"][1]) is tuple
    assert math.copysign(1, arrived[0]["keys"]["$tag"]) == -1


def test_what_has_no_form_is_an_error_of_the_episode() -> None:
    with pytest.raises(EpisodeError, match=r"message\.task is a set.*environment_workers: 0"):
        pack({"task": {1}})


def test_a_frame_that_nobody_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed(b"\xff" * 8))


def test_a_pulse_is_seen_on_the_other_side() -> None:
    ours = SharedStatus()
    theirs = SharedStatus(ours.descriptor)
    theirs.beat()
    theirs.enter(7)
    assert (ours.beats, ours.session) == (1, 7)
    theirs.enter(0)
    assert ours.session == 0
    theirs._shared.close()
    ours.close()
