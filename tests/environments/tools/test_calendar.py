from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kapelle.environments.tools.calendar import MAX_EVENTS, Calendar, Events
from kapelle.environments.tools.contract import ToolFault, fit_arguments

TWO = (
    {"title": "choir", "start": "2031-03-04 18:00", "minutes": 90},
    {"title": "lunch", "start": "2031-03-05 12:00", "minutes": 60},
)


def calendar(**changes: Any) -> Events:
    return Calendar(**{"events": TWO, **changes}).open()


def call(events: Events, name: str, **arguments: Any) -> str:
    [tool] = [tool for tool in events.tools if tool.schema.name == name]
    try:
        return tool.call(fit_arguments(arguments, tool.schema.parameters))
    except ToolFault as fault:
        return f"Error: {fault}"


def test_events_are_created_listed_moved_and_deleted() -> None:
    events = calendar()
    assert call(events, "create_event", title="dentist", start="2031-03-04 10:00", minutes=30) == (
        "Created [3] 2031-03-04 10:00 to 10:30 dentist."
    )
    assert call(events, "list_events") == (
        "It is Monday 2031-03-03 09:00.\n"
        "[3] 2031-03-04 10:00 to 10:30 dentist\n"
        "[1] 2031-03-04 18:00 to 19:30 choir\n"
        "[2] 2031-03-05 12:00 to 13:00 lunch"
    )
    moved = call(events, "move_event", number=1, start="2031-03-05 23:30", minutes=60)
    assert moved == "Moved [1] 2031-03-05 23:30 to 2031-03-06 00:30 choir."
    assert call(events, "delete_event", number=2) == "Deleted [2] 2031-03-05 12:00 to 13:00 lunch."
    assert events.state() == [["dentist", "2031-03-04 10:00", 30], ["choir", "2031-03-05 23:30", 60]]


def test_a_day_lists_its_own_events() -> None:
    late = {"title": "night train", "start": "2031-03-04 22:00", "minutes": 120}
    events = calendar(events=(late,))
    assert "night train" in call(events, "list_events", day="2031-03-04")
    assert call(events, "list_events", day="2031-03-05").endswith("No events.")
    longer = calendar(events=({**late, "minutes": 121},))
    assert "night train" in call(longer, "list_events", day="2031-03-05")


def test_an_overlap_names_the_event_in_the_way() -> None:
    events = calendar()
    before = events.state()
    in_the_way = "Error: It would overlap [1] 2031-03-04 18:00 to 19:30 choir."
    assert call(events, "create_event", title="x", start="2031-03-04 19:29", minutes=1) == in_the_way
    assert call(events, "create_event", title="x", start="2031-03-04 17:00", minutes=61) == in_the_way
    assert call(events, "move_event", number=2, start="2031-03-04 18:30") == in_the_way
    assert events.state() == before
    # Adjacent events do not overlap, and an event does not overlap itself.
    assert call(events, "create_event", title="x", start="2031-03-04 17:00", minutes=60).startswith("Created")
    assert call(events, "create_event", title="x", start="2031-03-05 13:00", minutes=60).startswith("Created")
    assert call(events, "move_event", number=1, start="2031-03-04 18:15").startswith("Moved")


def event(**changes: Any) -> dict[str, Any]:
    return {"title": "x", "start": "2031-01-01 10:00", "minutes": 5, **changes}


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("list_events", {"day": "tomorrow"}, "not a day and time"),
        ("create_event", event(title=" "), "1 to 120 characters"),
        ("create_event", event(title="x" * 121), "1 to 120 characters"),
        ("create_event", event(start="2031-02-30 10:00"), "not a day and time"),
        ("create_event", event(minutes=0), "1 to 10,080"),
        ("create_event", event(minutes=10**30), "1 to 10,080"),
        ("create_event", event(start="9999-12-31 23:59"), "ends before"),
        ("create_event", event(start="9" * 100_000), "999"),
        ("create_event", {"title": "x", "start": "2031-01-01 10:00"}, "`minutes`"),
        ("move_event", {"number": 7, "start": "2031-01-01 10:00"}, "no event 7"),
        ("delete_event", {"number": 10**50}, "no event 1000"),
    ],
)
def test_an_invalid_call_is_one_short_line_without_a_change(
    name: str, arguments: dict[str, Any], why: str
) -> None:
    events = calendar()
    before = events.state()
    answer = call(events, name, **arguments)
    assert answer.startswith("Error: ")
    assert why in answer
    assert len(answer) < 200
    assert events.state() == before


def test_a_calendar_has_a_limit() -> None:
    events = calendar(events=())
    days = [f"2031-{1 + k // 28:02d}-{1 + k % 28:02d} 10:00" for k in range(MAX_EVENTS)]
    for day in days:
        call(events, "create_event", title="x", start=day, minutes=1)
    assert len(events.state()) == MAX_EVENTS
    assert "calendar is full" in call(events, "create_event", title="x", start="2035-01-01 10:00", minutes=1)


def test_each_agent_has_its_own_calendar_at_a_fixed_time() -> None:
    shared = Calendar(now="2031-03-05 7:05")
    one, other = shared.open(), shared.open()
    call(one, "create_event", title="x", start="2031-03-04 10:00", minutes=5)
    assert call(other, "list_events") == "It is Wednesday 2031-03-05 07:05.\nNo events."


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValidationError, match="noon"):
        Calendar(now="noon")
    with pytest.raises(ValidationError, match="minutes"):
        Calendar.model_validate({"events": [event(minutes=0)]})


@settings(max_examples=30)
@given(st.text(max_size=40), st.text(max_size=30), st.integers())
def test_no_text_breaks_a_calendar(title: str, start: str, minutes: int) -> None:
    events = calendar()
    call(events, "create_event", title=title, start=start, minutes=minutes)
    call(events, "move_event", number=1, start=start, minutes=minutes)
    assert len(events.state()) in {2, 3}
