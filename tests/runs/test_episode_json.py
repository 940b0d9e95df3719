import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kapelle.errors import DataError
from kapelle.runs.episode_json import dump_episode, dump_groups, load_episode, load_groups
from kapelle.types import Constraint, Episode, Group, Message, Task, Turn

finite = st.floats(allow_nan=False, allow_infinity=False)
# Every character, lone surrogates too: an endpoint may send them.
text = st.text(st.characters(codec=None), max_size=12)
names = st.sampled_from(["reasoner", "actor", "критик", "a b/c"])
ids = st.lists(st.integers(0, 200_000), max_size=5).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
constraints = st.builds(Constraint, kind=st.sampled_from(["json_schema", "regex", "choices"]), text=text)
messages = st.builds(Message, role=text, content=text, speaker=st.none() | names)
tasks = st.builds(
    Task, id=text, question=text, data=st.dictionaries(text, json_values, max_size=3), part=text
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    completion = draw(ids)
    return Turn(
        agent=draw(names),
        policy=draw(names),
        version=draw(st.integers(0, 10**9)),
        weights_hash=draw(text),
        index=draw(st.integers(0, 99)),
        completed_before=draw(st.integers(0, 99)),
        prompt_ids=draw(ids),
        completion_ids=completion,
        logprobs=tuple(draw(finite) for _ in completion),
        finish_reason=draw(st.sampled_from(["stop", "length", "error"])),
        text=draw(text),
        new_messages=tuple(draw(st.lists(messages, max_size=2))),
        reward=draw(finite),
        parent=draw(st.none() | st.integers(0, 99)),
        trained=draw(st.booleans()),
        constraint=draw(st.none() | constraints),
        versions=((4, 1), (7, len(completion) - 1)) if len(completion) > 1 and draw(st.booleans()) else (),
    )


episodes = st.builds(
    Episode,
    task=tasks,
    seed=st.integers(0, 2**63 - 1),
    agents=st.lists(names, max_size=3).map(tuple),
    turns=st.lists(turns(), max_size=3).map(tuple),
    rewards=st.dictionaries(names, finite, max_size=3),
    success=st.none() | finite,
    info=st.dictionaries(text, json_values, max_size=3),
    truncated=st.booleans(),
    error=st.none() | text,
    roles=st.dictionaries(names, text, max_size=2),
    final=st.none() | text,
)


def read_back(episode: Episode) -> Episode:
    return load_episode(json.loads(dump_episode(episode)))


TASK = Task("add-1", "12+30", {"gold": "42"})
TURN = Turn(
    agent="actor",
    policy="actor",
    version=3,
    weights_hash="ab12",
    index=0,
    completed_before=0,
    prompt_ids=(1, 2),
    completion_ids=(7, 0),
    logprobs=(-0.1, -0.25),
    finish_reason="stop",
    text="42",
    new_messages=(Message("user", "12+30"),),
    reward=0.5,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(episodes)
def test_an_episode_returns_with_every_field_equal(episode: Episode) -> None:
    back = read_back(episode)
    assert back == episode
    # repr tells -0.0 from 0.0 and 1 from 1.0, which == does not.
    assert repr(back) == repr(episode)


def test_line_breaks_of_every_kind_stay_inside_the_line() -> None:
    odd = "a\nb\r\u2028c\x85d\x1ee"
    line = dump_episode(Episode(TASK, 0, ("actor",), (replace(TURN, text=odd),)))
    assert line[:-1].decode("ascii").splitlines() == [line[:-1].decode("ascii")]
    assert load_episode(json.loads(line)).turns[0].text == odd


def test_a_failed_episode_keeps_the_reward_that_broke_it() -> None:
    episode = Episode(
        TASK,
        0,
        ("actor",),
        (replace(TURN, reward=math.nan),),
        {"actor": -math.inf},
        error="EpisodeError: nan",
    )
    line = dump_episode(episode)
    assert b"NaN" not in line
    assert b"Infinity" not in line
    back = load_episode(json.loads(line))
    assert math.isnan(back.turns[0].reward)
    assert back.rewards == {"actor": -math.inf}
    assert back.error == "EpisodeError: nan"


def test_tuples_in_info_stay_tuples() -> None:
    episode = Episode(TASK, 0, ("actor",), info={"moves": ("c", "d"), "best": {(0, 1): 3.0}})
    assert read_back(episode).info == {"moves": ("c", "d"), "best": {(0, 1): 3.0}}


def test_groups_return_in_order_with_a_repeated_task() -> None:
    other = Task("add-2", "1+1")
    groups = [
        Group(task, tuple(Episode(task, seed, ("actor",)) for seed in seeds))
        for task, seeds in [(TASK, (1, 2)), (other, (3, 4)), (TASK, (5, 6))]
    ]
    assert load_groups(map(json.loads, dump_groups(7, groups).splitlines())) == groups


def test_an_episode_that_cannot_be_recorded_is_named() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for info in ({"answers": {1, 2}}, {"raw": b"42"}, {"deep": deep}):
        with pytest.raises(DataError, match="'add-1'"):
            dump_episode(Episode(TASK, 0, ("actor",), info=info))


@pytest.mark.parametrize("broken", [{}, {"task": 3}, {"task": {"id": "x"}}])
def test_a_row_of_another_form_raises(broken: dict[str, Any]) -> None:
    row = json.loads(dump_episode(Episode(TASK, 0, ("actor",))))
    with pytest.raises(DataError, match="an unknown form"):
        load_episode(broken if not broken else {**row, **broken})


def test_rows_of_a_group_with_different_tasks_raise() -> None:
    groups = [Group(TASK, (Episode(TASK, 1, ("actor",)), Episode(TASK, 2, ("actor",))))]
    rows = [json.loads(line) for line in dump_groups(7, groups).splitlines()]
    rows[1]["task"]["id"] = "another"
    with pytest.raises(DataError, match="different tasks"):
        load_groups(rows)
