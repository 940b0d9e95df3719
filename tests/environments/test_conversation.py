from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import Say, expert, lines, play, transcript

from kapelle.environments.conversation import ERRANDS, UserConversation, booking, rating
from kapelle.errors import ConfigError
from kapelle.types import Episode, Task
from kapelle.workflows.play import PlayWorkflow

WISHES = {"day": "friday", "people": "four"}
USER = Task(
    "train-0", "", {"errand": "table", "wishes": WISHES, "persona": "open", "told": None, "difficulty": 2}
)
TERSE = Task("train-1", "", {**USER.data, "persona": "terse"})
TALKATIVE = Task("train-2", "", {**USER.data, "persona": "talkative", "told": "people"})
RIGHT = "BOOK day=Friday; people=four"
TALK = PlayWorkflow(memory="conversation")


async def talk(environment: UserConversation, scripts: dict[str, Say], task: Task = USER) -> Episode:
    environment.check([*scripts])
    workflow = TALK if environment.view == "latest" else PlayWorkflow()
    [episode] = await play(environment, workflow, [*scripts], scripts, task)
    assert episode.error is None
    return episode


async def alone(*said: str, task: Task = USER, **settings: Any) -> Episode:
    return await talk(UserConversation(view="latest", **settings), {"assistant": lines(*said)}, task)


async def test_a_whole_conversation_with_the_scripted_user_is_as_stated() -> None:
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
    ("task", "said", "answer"),
    [
        (USER, "day? time?", "As to the day: friday. As to the time: any is fine."),
        (USER, "For four?", "As to the people: four."),
        (USER, "people, then the DAY", "As to the people: four. As to the day: friday."),
        (TERSE, "people, then the day", "As to the people: four."),
        (USER, "Good evening!", "What would you like to know?"),
        (USER, "", "What would you like to know?"),
        (USER, "Every daytime is fine, peoples.", "What would you like to know?"),
        (USER, "x" * 2000 + " day", "What would you like to know?"),
    ],
)
async def test_the_user_answers_what_it_is_asked_and_no_more(task: Task, said: str, answer: str) -> None:
    assert UserConversation().answer(task, said) == answer
    assert (await alone(said, RIGHT, task=task)).turns[1].heard[0].content == answer


async def test_a_talkative_user_names_a_wish_at_once() -> None:
    assert (
        UserConversation().opening(TALKATIVE)
        == "Hello, I would like to book a table. As to the people: four."
    )


@pytest.mark.parametrize(
    ("said", "met", "answers"),
    [
        ([RIGHT], 1.0, 1),
        (["BOOK day=friday", "BOOK day=friday"], 0.5, 2),
        (["BOOK nothing", RIGHT], 1.0, 2),
        (["BOOK", "BOOK"], 0.0, 2),
        (["hm", "hm", "hm"], 0.0, 3),
    ],
)
async def test_satisfaction_is_the_share_of_wishes_met_less_what_turns_cost(
    said: list[str], met: float, answers: int
) -> None:
    episode = await alone(*said, max_turns=3, turn_cost=0.1)
    assert episode.rewards == {"assistant": pytest.approx(max(0.0, met - 0.1 * answers))}
    assert episode.success == met
    assert len(episode.turns) == answers


async def test_a_conversation_ends_with_the_users_patience_or_at_its_limit() -> None:
    wrong = "BOOK day=monday; people=four"
    assert (await alone(wrong, patience=0)).info["ended_by"] == "user"
    assert len((await alone(*[wrong] * 4, patience=3)).turns) == 4
    late = await alone("hm", "hm", max_turns=2)
    assert late.info["ended_by"] == "limit"
    assert late.truncated


async def test_a_model_is_the_user_and_its_word_ends_the_conversation() -> None:
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
async def test_nobody_but_the_user_reads_its_wishes(view: Any, agents: list[str]) -> None:
    environment = UserConversation(user="guest", view=view, personas=("open",))
    for k in range(20):
        task = environment.task("train", k)
        hm = {agent: lines(*["hm"] * 30) for agent in agents}
        episode = await talk(environment, hm, task)
        for turn in episode.turns:
            read = " ".join(message.content for message in turn.heard)
            assert (environment.wishes(task) in read) == (
                turn.agent == "guest" and (view == "transcript" or not turn.seen)
            )
            if turn.agent != "guest":
                assert not any(value in read for value in task.data["wishes"].values())


async def test_the_scripted_users_wishes_stay_with_it_until_it_is_asked() -> None:
    environment = UserConversation(personas=("terse", "open"))
    for k in range(40):
        task = environment.task("train", k)
        shown = environment.start(task, ["assistant"], 0).observe("assistant")
        assert not any(value in shown for value in task.data["wishes"].values()), shown


async def test_several_assistants_answer_in_turn_and_are_paid_alike() -> None:
    scripts = {"front": lines("Which day?", RIGHT), "back": lines("How many people?")}
    episode = await talk(UserConversation(view="latest"), scripts)
    assert [turn.agent for turn in episode.turns] == ["front", "back", "front"]
    # The second one reads what the first one has said and been told.
    assert (
        episode.turns[1]
        .heard[0]
        .content.endswith("Assistant front: Which day?\nUser: As to the day: friday.")
    )
    assert episode.rewards == {"front": pytest.approx(0.94), "back": pytest.approx(0.94)}


async def test_every_reader_of_a_transcript_reads_all_of_it() -> None:
    episode = await talk(UserConversation(), {"assistant": lines("day?", RIGHT)})
    assert (
        episode.turns[1]
        .heard[0]
        .content.endswith(
            "User: Hello, I would like to book a table.\nAssistant: day?\nUser: As to the day: friday."
        )
    )


@pytest.mark.parametrize(
    ("said", "satisfied"),
    [
        ("9", 0.9),
        ("I give 10 of 10.", 1.0),
        ("0", 0.0),
        ("great", 0.0),
        ("11", 0.0),
        ("-3", 0.0),
        ("7.5", 0.0),
        ("1000", 0.0),
    ],
)
async def test_the_users_agent_is_asked_for_a_number(said: str, satisfied: float) -> None:
    environment = UserConversation(user="guest", satisfaction="user", view="latest", turn_cost=0.0)
    scripts = {"guest": lines("hi", "bye", said), "assistant": lines(RIGHT)}
    episode = await talk(environment, scripts)
    assert (
        episode.turns[-1].heard[-1].content == "How satisfied are you, from 0 to 10? Answer with the number."
    )
    assert episode.rewards == {name: pytest.approx(satisfied) for name in scripts}
    assert episode.success == 1.0, "how many wishes were met is told apart from what the user says"
    assert (episode.info["rating"] is None) == (rating(said) is None)


@pytest.mark.parametrize("wording", ["full", "short"])
@pytest.mark.parametrize("view", ["transcript", "latest"])
@pytest.mark.parametrize("user", ["script", "guest"])
async def test_the_expert_satisfies_every_user(wording: Any, view: Any, user: str) -> None:
    environment = UserConversation(user=user, wording=wording, view=view, difficulty=(1, 4), max_turns=5)
    agents = ["assistant", "guest"] if user == "guest" else ["assistant"]
    for k in range(12):
        task = environment.task("test", k)
        episode = await talk(environment, dict.fromkeys(agents, expert(environment)), task)
        assert episode.success == 1.0, transcript(episode)
        assert episode.info["ended_by"] == "user"


async def test_an_errand_has_as_many_things_as_are_set() -> None:
    environment = UserConversation(things=2, difficulty=(1, 2), wording="short", errands=("table",))
    assert environment.assistants_head(USER) == "table: day time"
    assert {slot for k in range(40) for slot in environment.task("train", k).data["wishes"]} == {
        "day",
        "time",
    }
    task = environment.task("train", 0)
    assert (await talk(environment, {"assistant": expert(environment)}, task)).success == 1.0


async def test_a_flawed_expert_books_before_it_asks() -> None:
    environment = UserConversation(wording="short", flaws={"assistant": 1.0})
    episode = await talk(environment, {"assistant": expert(environment)})
    assert episode.turns[0].text.startswith("BOOK day=")


def test_bookings_are_read_from_the_last_line_that_begins_with_the_word() -> None:
    assert booking("**BOOK: Day = Friday, time=19:00.") == {"day": "friday", "time": "19:00"}
    assert booking("BOOK day=monday\nno, wait\nbook day=friday") == {"day": "friday"}
    assert booking("I shall BOOK day=friday") is None
    assert booking("BOOKS day=friday") is None
    assert booking("BOOK " + "a=" * 100_000) is not None


def test_users_of_both_splits_want_different_things() -> None:
    environment = UserConversation()
    wanted = {
        split: {
            str((t.data["errand"], t.data["wishes"]))
            for t in (environment.task(split, k) for k in range(300))
        }
        for split in ("train", "test")
    }
    assert wanted["train"].isdisjoint(wanted["test"])
    assert all(
        " " not in value
        for errand in ERRANDS.values()
        for values in errand.slots.values()
        for value in values
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"satisfaction": "user"},
            "`satisfaction: user` asks an agent for a number, and the user is a script.",
        ),
        ({"turn_cost": 2.0}, "turn_cost"),
        ({"errands": []}, "errands"),
        ({"difficulty": (1, 5)}, "`difficulty` goes to 5; the hardest is 4"),
        ({"things": 2}, "`difficulty` goes to 4, and an errand has 2 `things`. Set `things` higher"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        UserConversation(**settings)


def test_a_user_who_is_not_there_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"`environment.user: gest` names no agent of the team \(guest, a\).*'guest'"
    ):
        UserConversation(user="gest").check(["guest", "a"])
    with pytest.raises(ConfigError, match="The team has only the user, 'guest'"):
        UserConversation(user="guest").check(["guest"])
