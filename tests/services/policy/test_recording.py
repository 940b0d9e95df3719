"""Calls of outside programs, recorded as episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError, OpenAI

from kapelle.errors import DataError, OutputError
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.policy.recording import FILE, EpisodeFile, Sessions, read_recorded
from kapelle.services.policy.service import PolicyServer
from kapelle.services.request_errors import RequestError
from kapelle.types import Episode

Messages = list[Any]


def say(client: OpenAI, messages: Messages, agent: str = "first", **more: Any) -> Any:
    said = client.chat.completions.create(model=f"duo/{agent}", messages=messages, max_tokens=8, **more)
    messages.append(said.choices[0].message.model_dump(exclude_none=True))
    return said


def session_of(said: Any) -> str:
    return str(said.model_extra["kapelle"]["session"])


def reward(client: OpenAI, session: str, **body: Any) -> dict[str, Any]:
    return client.post(f"/sessions/{session}/reward", body=body, cast_to=dict[str, Any])


def episode(recorded: Path, reply: dict[str, Any]) -> Episode:
    return read_recorded(recorded)[int(reply["episode"])]


def test_one_conversation_is_one_session(client: OpenAI, recorded: Path, setup: RolloutSetup) -> None:
    """Three turns of one conversation are one session; each prompt begins with the exact tokens of the last turn."""
    messages: Messages = [{"role": "user", "content": "2+2?"}]
    said: list[Any] = []
    for k in range(3):
        said.append(say(client, messages, logprobs=True))
        messages.append({"role": "user", "content": f"go on {k}"})
    [name] = set(map(session_of, said))
    expected = episode(recorded, reward(client, name, reward=0.5, success=1.0))
    assert (expected.success, expected.error, expected.agents) == (1.0, None, ("first", "second"))
    assert expected.rewards == {"first": 0.5}, "who said nothing earns nothing"
    assert [turn.index for turn in expected.turns] == [0, 1, 2]
    assert [turn.completed_before for turn in expected.turns] == [0, 1, 2]
    for before, turn in zip(expected.turns, expected.turns[1:], strict=False):
        assert (
            turn.prompt_ids[: len(before.prompt_ids + before.completion_ids)]
            == before.prompt_ids + before.completion_ids
        )
    assert [len(turn.new_messages) for turn in expected.turns] == [2, 1, 1]
    assert list(expected.turns[2].logprobs) == [each.logprob for each in said[2].choices[0].logprobs.content]
    assert {(turn.version, turn.policy, turn.trained) for turn in expected.turns} == {
        (7, setup.team.policy("first").name, True)
    }
    with pytest.raises(NotFoundError):
        reward(client, name, reward=1.0)


def test_equal_conversations_have_separate_sessions(client: OpenAI) -> None:
    conversations: list[Messages] = [[{"role": "user", "content": "likewise"}] for _ in range(2)]
    first = [session_of(say(client, each, seed=1)) for each in conversations]
    for each in conversations:
        each.append({"role": "user", "content": "and then?"})
    assert {session_of(say(client, each)) for each in conversations} == set(first)


def test_agents_that_name_their_session_share_it(client: OpenAI, recorded: Path) -> None:
    """By the header or the address."""
    named = client.with_options(default_headers={"x-kapelle-session": "mine", "x-kapelle-task": "t-1"})
    there = client.with_options(base_url=f"{str(client.base_url).removesuffix('v1/')}sessions/mine/v1")
    say(named, [{"role": "user", "content": "plan"}], "first")
    say(there, [{"role": "user", "content": "do"}], "second")
    say(named, [{"role": "user", "content": "plan again"}], "first")
    reply = there.post("/reward", body={"rewards": {"second": -1.0}}, cast_to=dict[str, Any])
    expected = episode(recorded, reply)
    assert [turn.agent for turn in expected.turns] == ["first", "second", "first"]
    assert expected.rewards == {"second": -1.0}
    assert expected.task.id == "t-1"
    assert reply["restarts"] == 1, "`first` began anew"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_the_whole_team_is_an_episode_of_all_its_turns(
    client: OpenAI, recorded: Path, setup: RolloutSetup, *, stream: bool
) -> None:
    request: Any = {
        "model": "duo",
        "messages": [{"role": "user", "content": "2+2?"}],
        "seed": 4,
        "max_tokens": 8,
    }
    raw = client.chat.completions.with_raw_response.create(**request, stream=stream)
    name = raw.headers["x-kapelle-session"]
    said: Any = raw.parse()
    first = next(iter(said)) if stream else said
    assert session_of(first) == name
    if stream:
        list(said)
    expected = episode(recorded, reward(client, name, reward=0.5))
    assert expected.rewards == {"first": 0.5, "second": 0.5}
    assert [turn.index for turn in expected.turns] == list(range(len(expected.turns)))
    assert {turn.agent for turn in expected.turns} == {"first", "second"}
    assert all(len(turn.logprobs) == len(turn.completion_ids) > 0 for turn in expected.turns)
    assert {(turn.version, turn.policy) for turn in expected.turns} == {
        (7, setup.team.policy(agent).name) for agent in ("first", "second")
    }
    if not stream:
        reply = said.choices[0].model_extra["kapelle"]["turns"]
        assert [each["text"] for each in reply] == [turn.text for turn in expected.turns]


def test_edits_and_compaction_restart_a_conversation_and_are_counted(client: OpenAI, recorded: Path) -> None:
    named = client.with_options(default_headers={"x-kapelle-session": "edited"})
    messages: Messages = [{"role": "user", "content": "one"}]
    say(named, messages)
    kept = list(messages)
    for words in ("two", "two, in other words"):
        branch = [*kept, {"role": "user", "content": words}]
        say(named, branch)
    say(named, [{"role": "user", "content": "a summary of it all"}])
    edited = [
        messages[0],
        {**messages[1], "content": "what it never said"},
        {"role": "user", "content": "two"},
    ]
    say(named, edited)
    reply = reward(client, "edited", reward=1.0)
    assert (reply["turns"], reply["branches"], reply["restarts"]) == (5, 1, 2)
    turns = episode(recorded, reply).turns
    opening = turns[0].prompt_ids + turns[0].completion_ids
    assert [turn.prompt_ids[: len(opening)] == opening for turn in turns] == [False, True, True, False, False]


def test_an_unfinished_line_is_cut_off(tmp_path: Path, recorded: Path, client: OpenAI) -> None:
    reward(client, session_of(say(client, [{"role": "user", "content": "one"}])), reward=1.0)
    line = (recorded / FILE).read_bytes().splitlines(keepends=True)[-1]
    (tmp_path / FILE).write_bytes(line + line[:100])
    assert len(read_recorded(tmp_path)) == 1
    EpisodeFile(tmp_path, ("first", "second")).close()
    assert (tmp_path / FILE).read_bytes() == line
    (tmp_path / FILE).write_bytes(line + b"{\n" + line)
    with pytest.raises(DataError, match="Line 2 "):
        EpisodeFile(tmp_path, ("first", "second"))


def test_a_reward_lost_to_a_full_disk_can_be_posted_again(
    client: OpenAI, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = session_of(say(client, [{"role": "user", "content": "1+1?"}]))
    before = read_recorded(recorded)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("kapelle.services.policy.recording.os.fsync", full)
        with pytest.raises(APIStatusError, match="No space left") as raised:
            reward(client, name, reward=1.0)
    assert raised.value.status_code == 507
    assert read_recorded(recorded) == before, "nothing is left of it"
    assert episode(recorded, reward(client, name, reward=1.0)).rewards == {"first": 1.0}


class TestLifetimes:
    """Sessions without a reward are dropped in the order of their last calls."""

    @staticmethod
    def crowd(most: int, lifetime: float = 60.0) -> tuple[Sessions, list[float]]:
        now = [0.0]
        return Sessions(most, lifetime, clock=lambda: now[0]), now

    def test_named_sessions_expire_after_a_lifetime_without_calls(self) -> None:
        sessions, now = self.crowd(3)
        for name in "abc":
            sessions.begin(name)
        now[0] = 30.0
        sessions.begin("b")
        with pytest.raises(RequestError, match=r"3 sessions.*60 s"):
            sessions.begin("d")
        now[0] = 61.0
        sessions.begin("d")
        assert sorted(each.name for each in sessions) == ["b", "d"]
        assert sessions.dropped == 2

    def test_unnamed_sessions_expire_first_and_none_during_an_answer(self) -> None:
        sessions, now = self.crowd(3)
        first, second = sessions.begin(), sessions.begin()
        sessions.begin("named")
        now[0] = 1.0
        first.under_way = 1
        sessions.begin("new")
        assert {each.name for each in sessions} == {first.name, "named", "new"}
        assert second.name not in {each.name for each in sessions}
        now[0] = 1000.0
        sessions.begin("newer")
        assert {each.name for each in sessions} == {first.name, "newer"}, (
            "an answer is under way in the first"
        )


def test_a_session_is_deleted_without_a_trace(client: OpenAI, recorded: Path) -> None:
    header = {"x-kapelle-session": "unwanted"}
    say(client, [{"role": "user", "content": "hello"}], extra_headers=header)
    before = len(read_recorded(recorded)) if (recorded / FILE).exists() else 0
    reply = client.delete("/sessions/unwanted", cast_to=dict[str, Any])
    assert reply == {"session": "unwanted", "turns": 1, "deleted": True}
    for again in (
        lambda: client.delete("/sessions/unwanted", cast_to=object),
        lambda: reward(client, "unwanted", reward=1.0),
    ):
        with pytest.raises(NotFoundError):
            again()
    assert len(read_recorded(recorded)) == before


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"id": 1}\n{"id": 2}\n',
        b'{"step":0}\n',
        b'{"step"x',
    ],
)
def test_a_foreign_file_stays_unchanged(foreign: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(foreign)
    with pytest.raises((DataError, OutputError), match=r"another folder|a folder other than"):
        EpisodeFile(tmp_path, ["first"])
    assert (tmp_path / FILE).read_bytes() == foreign


def test_a_second_server_does_not_write_to_the_same_folder(tmp_path: Path) -> None:
    first = EpisodeFile(tmp_path, ("first",))
    with pytest.raises(OutputError, match="Another server"):
        EpisodeFile(tmp_path, ("first",))
    first.close()
    EpisodeFile(tmp_path, ("first",)).close()
    assert read_recorded(str(tmp_path)) == []
    with pytest.raises(DataError, match="cannot be read"):
        read_recorded(str(tmp_path / "absent"))


@pytest.mark.parametrize("base", ["/v1/", "//v1", "/sessions/slashes/v1//"])
def test_slashes_too_many_in_an_address_have_no_effect(server: PolicyServer, base: str) -> None:
    with OpenAI(base_url=f"{server.url}{base}", api_key="none", max_retries=0, timeout=60.0) as made:
        answer = made.chat.completions.create(model="first", messages=[{"role": "user", "content": "x"}])
        assert made.models.retrieve("first/").id == "duo/first"
    session: Any = answer.model_dump()["kapelle"]["session"]
    assert (session == "slashes") == ("slashes" in base)
