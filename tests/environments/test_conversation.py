from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play, transcript

from kapelle.environments.conversation import UserConversation, booking, rating
from kapelle.errors import ConfigError
from kapelle.types import Episode, Task
from kapelle.workflows.play import PlayWorkflow

WISHES = {"day": "friday", "people": "four"}
USER = Task(
    "train-0", "", {"errand": "table", "wishes": WISHES, "persona": "open", "told": None, "difficulty": 2}
)
TERSE = Task("train-1", "", {**USER.data, "persona": "terse"})
RIGHT = "BOOK day=Friday; people=four"
TALK = PlayWorkflow(memory="conversation")


async def talk(environment: UserConversation, scripts: dict[str, Say], task: Task = USER) -> Episode:
    environment.check([*scripts])
    workflow = TALK if environment.view == "latest" else PlayWorkflow()
    [episode] = await play(environment, workflow, [*scripts], scripts, task)
    assert episode.error is None
    return episode


async def alone(*texts: str, task: Task = USER, **settings: Any) -> Episode:
    return await talk(UserConversation(view="latest", **settings), {"assistant": lines(*texts)}, task)


async def test_a_conversation_with_the_scripted_user() -> None:
    episode = await alone(
        "Which day, and how many people?", "BOOK day=friday; people=two", f"Sorry.\n{RIGHT}"
    )
    assert transcript(episode) == [
        (
            "0 seen=0 You serve a user who would like to book a table. Find out what matters to the user; it may be: day, "
            "time, people, place. When you know, write one line with all of it:\nBOOK day=…; time=…\n"
            "Hello, I would like to book a table. -> assistant: Which day, and how many people?"
        ),
        "1 seen=1 As to the day: friday. As to the people: four. -> assistant: BOOK day=friday; people=two",
        f"2 seen=2 No, something is wrong with the people. -> assistant: Sorry.\n{RIGHT}",
    ]
    assert episode.rewards == {"assistant": pytest.approx(1.0 - 3 * 0.02)}
    assert episode.success == 1.0
    assert not episode.truncated
    assert episode.info["ended_by"] == "user"
    assert episode.info["answers"] == 3


@pytest.mark.parametrize(
    ("task", "text", "answer"),
    [
        (USER, "day? time?", "As to the day: friday. As to the time: any is fine."),
        (USER, "For four?", "As to the people: four."),
        (USER, "people, then the DAY", "As to the people: four. As to the day: friday."),
        (TERSE, "people, then the day", "As to the people: four."),
        (USER, "Good evening!", "What would you like to know?"),
        (USER, "Every daytime is fine, peoples.", "What would you like to know?"),
        (USER, "x" * 2000 + " day", "What would you like to know?"),
    ],
)
async def test_the_user_answers_only_questions(task: Task, text: str, answer: str) -> None:
    assert UserConversation().answer(task, text) == answer
    assert (await alone(text, RIGHT, task=task)).turns[1].new_messages[0].content == answer


@pytest.mark.parametrize(
    ("texts", "met", "answers"),
    [
        ([RIGHT], 1.0, 1),
        (["BOOK day=friday", "BOOK day=friday"], 0.5, 2),
        (["BOOK nothing", RIGHT], 1.0, 2),
        (["BOOK", "BOOK"], 0.0, 2),
        (["hm", "hm", "hm"], 0.0, 3),
    ],
)
async def test_satisfaction_is_the_share_of_wishes_minus_the_cost_of_turns(
    texts: list[str], met: float, answers: int
) -> None:
    episode = await alone(*texts, max_turns=3, turn_cost=0.1)
    assert episode.rewards == {"assistant": pytest.approx(max(0.0, met - 0.1 * answers))}
    assert episode.success == met
    assert len(episode.turns) == answers


async def test_a_conversation_ends_by_patience_or_at_the_limit() -> None:
    wrong = "BOOK day=monday; people=four"
    assert (await alone(wrong, patience=0)).info["ended_by"] == "user"
    assert len((await alone(*[wrong] * 4, patience=3)).turns) == 4
    late = await alone("hm", "hm", max_turns=2)
    assert late.info["ended_by"] == "limit"
    assert late.truncated


async def test_a_model_as_the_user_ends_the_conversation() -> None:
    user = lines("A table, please.", "On friday.", "We are four.", "Fine. GOODBYE")
    assistant = lines("Which day?", "How many people?", RIGHT)
    episode = await talk(
        UserConversation(user="guest", view="latest"), {"guest": user, "assistant": assistant}
    )
    first, *_, last = transcript(episode)
    assert "Your wishes, which you alone know: day: friday; people: four." in first
    assert last.endswith(f"{RIGHT} -> guest: Fine. GOODBYE")
    assert [turn.agent for turn in episode.turns] == ["guest", "assistant"] * 3 + ["guest"]
    assert episode.rewards == {name: pytest.approx(0.94) for name in ("guest", "assistant")}


@pytest.mark.parametrize("view", ["transcript", "latest"])
@pytest.mark.parametrize("agents", [["guest", "assistant"], ["a", "guest", "b"]])
async def test_only_the_user_reads_its_wishes(view: Any, agents: list[str]) -> None:
    environment = UserConversation(user="guest", view=view, personas=("open",))
    for k in range(8):
        task = environment.task("train", k)
        hm = {agent: lines(*["hm"] * 30) for agent in agents}
        episode = await talk(environment, hm, task)
        for turn in episode.turns:
            read = " ".join(message.content for message in turn.new_messages)
            assert (environment.wishes(task) in read) == (
                turn.agent == "guest" and (view == "transcript" or not turn.completed_before)
            )
            if turn.agent != "guest":
                assert not any(value in read for value in task.data["wishes"].values())


async def test_several_assistants_answer_in_turn_with_equal_rewards() -> None:
    scripts = {"front": lines("Which day?", RIGHT), "back": lines("How many people?")}
    episode = await talk(UserConversation(view="latest"), scripts)
    assert [turn.agent for turn in episode.turns] == ["front", "back", "front"]
    assert (
        episode.turns[1]
        .new_messages[0]
        .content.endswith("Assistant front: Which day?\nUser: As to the day: friday.")
    )
    assert episode.rewards == {"front": pytest.approx(0.94), "back": pytest.approx(0.94)}


@pytest.mark.parametrize(
    ("text", "satisfied"),
    [
        ("9", 0.9),
        ("I give 10 of 10.", 1.0),
        ("11", 0.0),
        ("-3", 0.0),
        ("7.5", 0.0),
    ],
)
async def test_the_users_agent_rates_the_conversation(text: str, satisfied: float) -> None:
    environment = UserConversation(user="guest", satisfaction="user", view="latest", turn_cost=0.0)
    scripts = {"guest": lines("hi", "bye", text), "assistant": lines(RIGHT)}
    episode = await talk(environment, scripts)
    assert (
        episode.turns[-1].new_messages[-1].content
        == "How satisfied are you, from 0 to 10? Answer with the number."
    )
    assert episode.rewards == {name: pytest.approx(satisfied) for name in scripts}
    assert episode.success == 1.0
    assert (episode.info["rating"] is None) == (rating(text) is None)


@pytest.mark.parametrize("wording", ["full", "short"])
@pytest.mark.parametrize("view", ["transcript", "latest"])
@pytest.mark.parametrize("user", ["script", "guest"])
async def test_the_script_satisfies_every_user(wording: Any, view: Any, user: str) -> None:
    environment = UserConversation(user=user, wording=wording, view=view, difficulty=(1, 4), max_turns=5)
    agents = ["assistant", "guest"] if user == "guest" else ["assistant"]
    for k in range(5):
        task = environment.task("test", k)
        episode = await talk(environment, dict.fromkeys(agents, expert(environment)), task)
        assert episode.success == 1.0, transcript(episode)
        assert episode.info["ended_by"] == "user"


async def test_a_flawed_script_books_at_once() -> None:
    environment = UserConversation(wording="short", flaws={"assistant": 1.0})
    episode = await talk(environment, {"assistant": expert(environment)})
    assert episode.turns[0].text.startswith("BOOK day=")


def test_a_booking_is_the_last_line_with_the_word() -> None:
    assert booking("**BOOK: Day = Friday, time=19:00.") == {"day": "friday", "time": "19:00"}
    assert booking("BOOK day=monday\nno, wait\nbook day=friday") == {"day": "friday"}
    assert booking("I shall BOOK day=friday") is None
    assert booking("BOOKS day=friday") is None
    assert booking("BOOK " + "a=" * 100_000) is not None


def test_the_splits_share_no_wishes() -> None:
    environment = UserConversation()
    wishes = {
        split: {
            str((t.data["errand"], t.data["wishes"]))
            for t in (environment.task(split, k) for k in range(300))
        }
        for split in ("train", "test")
    }
    assert wishes["train"].isdisjoint(wishes["test"])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"satisfaction": "user"}, "satisfaction"),
        ({"difficulty": (1, 5)}, "hardest"),
        ({"things": 2}, "things"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        UserConversation(**settings)


def test_the_user_must_be_in_the_team() -> None:
    with pytest.raises(ConfigError, match="gest"):
        UserConversation(user="gest").check(["guest", "a"])
    with pytest.raises(ConfigError, match="the only agent"):
        UserConversation(user="guest").check(["guest"])
