"""Calendar tools, which list, create, move and delete the events of one episode. The time is fixed during an episode.

Events cannot overlap; the error message names the conflicting event. The system clock is not read, so episodes are reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSchema, ToolSettings
from kapelle.settings.base import Settings
from kapelle.types import Json

MAX_EVENTS = 200
"""The maximum number of events in a calendar."""
MAX_TITLE = 120
"""The maximum number of characters of a title."""
LONGEST = 7 * 24 * 60
"""The maximum length of an event in minutes."""
_FORM = "%Y-%m-%d %H:%M"

_START: Mapping[str, Json] = {"type": "string", "description": "such as 2031-03-04 10:00"}
_MINUTES: Mapping[str, Json] = {"type": "integer", "description": "how long it lasts"}
_NUMBER: Mapping[str, Json] = {"type": "integer", "description": "the event's number in the list"}
_LIST = ToolSchema(
    "list_events",
    "Says what day and time it is, and lists the events of one day or of all days.",
    {"type": "object", "properties": {"day": {"type": "string", "description": "such as 2031-03-04"}}},
)
_CREATE = ToolSchema(
    "create_event",
    "Creates an event; refused where it would overlap another one.",
    {
        "type": "object",
        "properties": {"title": {"type": "string"}, "start": _START, "minutes": _MINUTES},
        "required": ["title", "start", "minutes"],
    },
)
_MOVE = ToolSchema(
    "move_event",
    "Moves an event to another start, and changes how long it lasts if `minutes` is given.",
    {
        "type": "object",
        "properties": {"number": _NUMBER, "start": _START, "minutes": _MINUTES},
        "required": ["number", "start"],
    },
)
_DELETE = ToolSchema(
    "delete_event",
    "Deletes an event.",
    {"type": "object", "properties": {"number": _NUMBER}, "required": ["number"]},
)


def _moment(text: str) -> str:
    try:
        return datetime.strptime(text.strip()[:40], _FORM).strftime(_FORM)  # noqa: DTZ007 (a calendar on a wall)
    except ValueError:
        raise ValueError(
            f"'{text[:40]}' is not a day and time. Write it as YYYY-MM-DD HH:MM, such as '2031-03-04 10:00'."
        ) from None


Moment = Annotated[str, AfterValidator(_moment)]
"""A day and a time without a time zone, in the format `YYYY-MM-DD HH:MM`."""


class EventSettings(Settings):
    """Settings of an event that exists at the beginning of an episode."""

    title: str = Field(min_length=1, max_length=MAX_TITLE)
    """The title of the event."""
    start: Moment
    """The start of the event, in the format `YYYY-MM-DD HH:MM`."""
    minutes: int = Field(ge=1, le=LONGEST)
    """The length of the event in minutes."""


class Calendar(ToolSettings):
    """Settings of the tools `list_events`, `create_event`, `move_event` and `delete_event`. Each agent has its own calendar."""

    tool: Literal["calendar"] = "calendar"
    now: Moment = "2031-03-03 09:00"
    """The current time during the whole episode, in the format `YYYY-MM-DD HH:MM`."""
    events: tuple[EventSettings, ...] = Field(default=(), max_length=MAX_EVENTS)
    """The events at the beginning of an episode, numbered from 1."""

    def open(self) -> Events:
        """Return the calendar of one agent for one episode."""
        return Events(self)


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a calendar."""

    title: str
    start: datetime
    minutes: int

    @property
    def end(self) -> datetime:
        """The time at which the event ends (exclusive)."""
        return self.start + timedelta(minutes=self.minutes)

    def line(self) -> str:
        """Return the event as a line that agents read."""
        end = self.end
        until = end.strftime("%H:%M" if end.date() == self.start.date() else _FORM)
        return f"{self.start.strftime(_FORM)} to {until} {self.title}"


class Events(Toolbox):
    """The calendar of one agent in one episode."""

    def __init__(self, settings: Calendar) -> None:
        self._now = _read(settings.now)
        self._events = {
            number: Event(each.title, _read(each.start), each.minutes)
            for number, each in enumerate(settings.events, start=1)
        }
        self._next = len(self._events) + 1
        super().__init__(
            Tool(_LIST, self.list_events),
            Tool(_CREATE, self.create_event),
            Tool(_MOVE, self.move_event),
            Tool(_DELETE, self.delete_event),
        )

    def state(self) -> list[list[Json]]:
        """Return the title, start and length in minutes of every event, ordered by start."""
        held = sorted(self._events.values(), key=lambda event: (event.start, event.title))
        return [[event.title, event.start.strftime(_FORM), event.minutes] for event in held]

    def list_events(self, arguments: Mapping[str, Json]) -> str:
        """Return the current time, and the events of a day or all events, ordered by start."""
        day = arguments.get("day")
        if day is not None:
            day = _read(f"{day} 00:00").date()
        held = sorted(self._events.items(), key=lambda item: (item[1].start, item[0]))
        shown = [
            f"[{number}] {event.line()}"
            for number, event in held
            if day is None or event.start.date() <= day <= (event.end - timedelta(minutes=1)).date()
        ]
        return "\n".join([f"It is {self._now:%A} {self._now.strftime(_FORM)}.", *(shown or ["No events."])])

    def create_event(self, arguments: Mapping[str, Json]) -> str:
        """Create an event. Raises ToolFault if it overlaps another event or the calendar is full."""
        title = " ".join(str(arguments["title"]).split())
        if not 1 <= len(title) <= MAX_TITLE:
            raise ToolFault(f"A title has 1 to {MAX_TITLE} characters, and this one has {len(title):,}.")
        if len(self._events) >= MAX_EVENTS:
            raise ToolFault(f"The calendar is full: it has {MAX_EVENTS} events.")
        event = self._placed(Event(title, _read(arguments["start"]), int(arguments["minutes"])))
        number, self._next = self._next, self._next + 1
        self._events[number] = event
        return f"Created [{number}] {event.line()}."

    def move_event(self, arguments: Mapping[str, Json]) -> str:
        """Move an event. If the event would overlap another event, raises ToolFault and leaves the event unchanged."""
        number = arguments["number"]
        event = self._event(number)
        minutes = int(arguments.get("minutes", event.minutes))
        moved = self._placed(replace(event, start=_read(arguments["start"]), minutes=minutes), number)
        self._events[number] = moved
        return f"Moved [{number}] {moved.line()}."

    def delete_event(self, arguments: Mapping[str, Json]) -> str:
        """Delete the event with the given number."""
        number = arguments["number"]
        event = self._event(number)
        del self._events[number]
        return f"Deleted [{number}] {event.line()}."

    def _event(self, number: int) -> Event:
        if number not in self._events:
            raise ToolFault(
                f"There is no event {str(number)[:20]}. `list_events` shows the numbers of all events."
            )
        return self._events[number]

    def _placed(self, event: Event, itself: int | None = None) -> Event:
        """Return the event if it fits into the calendar. Raises ToolFault, which names the first conflicting event, if it overlaps."""
        if not 1 <= event.minutes <= LONGEST:
            raise ToolFault(f"An event lasts 1 to {LONGEST:,} minutes.")
        try:
            _ = event.end + timedelta(days=1)
        except OverflowError:
            raise ToolFault("The calendar ends before that.") from None
        for number, other in sorted(self._events.items(), key=lambda item: item[1].start):
            if number != itself and event.start < other.end and other.start < event.end:
                raise ToolFault(f"It would overlap [{number}] {other.line()}.")
        return event


def _read(text: str) -> datetime:
    try:
        return datetime.strptime(_moment(text), _FORM)  # noqa: DTZ007
    except ValueError as fault:
        raise ToolFault(str(fault)) from None
