"""The puzzles of AT-GRPO (arXiv:2510.11062): paths on a grid, Sudoku and Sokoban, which agents solve in several turns.

In each turn, all agents act in team order. Every agent but the last proposes an answer, which the next agents read. The answer of
the last agent changes the board, and the next turn starts from this board. An episode ends when the puzzle is solved, or after
`turns` turns. Use the workflow `play`.

The *progress* of a board, from 0 to 1, is the share of the shortest solution that is no longer needed (paths and Sokoban), or the
share of empty cells with the correct number (Sudoku). A move is a step into a neighbouring cell: U, D, L or R. A move into a wall
changes nothing. An answer that cannot be read changes nothing either.

Deviations from the authors' code (PettingLLMs at a054fb1):

- Rewards are from 0 to 1. The authors add penalties for moves and invalid moves, bonuses for shortest paths, and Manhattan
  distances, which measure progress incorrectly if a wall is in the way.
- The agent that proposes writes an answer, as all agents do. The authors' tool agent writes a program that prints one.
- A plan has at most `slack` times as many moves as the shortest solution, so a long random walk is not a solution.
"""

from __future__ import annotations

import math
import random
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from kapelle.environment import Environment, Outcome, Scripted
from kapelle.environments.base import BaseEnvironment, BaseState, need_movers
from kapelle.environments.questions import (
    Difficulty,
    Flaws,
    Problem,
    check_flaws,
    describe,
    draw_task,
    flawed,
    up_to,
)
from kapelle.errors import DataError
from kapelle.types import Json, Message, Split, Task

READ = 2000
"""The maximum number of characters, from the end of a message, that are searched for an answer or shown to other agents."""
MARK = "####"
"""The mark before an answer. Without a mark, the whole message is the answer."""
BOARDS = 2_000
"""The maximum number of random boards that are tried for one puzzle."""


class Puzzle(BaseEnvironment, Scripted):
    """Base class of puzzles that a team solves in several turns."""

    things: ClassVar[str]
    """The word for these puzzles in descriptions."""
    if TYPE_CHECKING:
        difficulty: tuple[int, int]

    turns: int = Field(default=4, ge=1)
    """The maximum number of turns. Each agent writes one message per turn."""
    reward: Literal["progress", "success"] = "progress"
    """The value of a board, of which an episode's reward is the increase: its `progress`, or 1 if the puzzle is solved (`success`)."""
    local_reward: float = Field(default=0.0, ge=0.0, le=1.0)
    """The weight of an agent's own proposals in its reward, like r_local in AT-GRPO. An agent that proposes is rewarded with
    `local_reward` times the value of the best board that its proposals lead to, plus (1 − `local_reward`) times the team's value."""
    wording: Literal["full", "short"] = "full"
    """The language of prompts. `full`: rules in complete sentences. `short`: only the board and the proposals, for a very small model."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a puzzle does
    not depend on the seed."""
    flaws: Flaws = Field(default_factory=dict)
    """Mapping from an agent to the fraction of its demonstrations in which its answer is random."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the generated puzzles of each split. A hash of the board determines the split."""
        return describe(self.things, self.difficulty)

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)

    def task(self, split: Split, index: int) -> Task:
        """Return the puzzle at an index, which is the same in every process."""
        return draw_task(
            cast("Environment", self).name, self.seed, split, index, self.difficulty, self._problem
        )

    def _problem(self, draw: random.Random, level: int) -> Problem:
        for _ in range(BOARDS):
            data = self.made(draw, level)
            if data is not None:
                board = str(data["board"])
                return Problem(f"{self.head()}{board}", data, board)
        raise DataError(
            f"`{cast('Environment', self).name}` found no puzzle of difficulty {level} in {BOARDS} random boards. "
            "Lower `environment.difficulty`, or change the size of the board."
        )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> PuzzleState:
        """Start an episode and return its state."""
        return PuzzleState(self, task, agents)

    def head(self) -> str:
        """Return the rules at the beginning of every observation. The result is empty if `wording` is `short`."""
        return f"{self.rules()}\n\n" if self.wording == "full" else ""

    @abstractmethod
    def rules(self) -> str:
        """Return the rules of the puzzle and the format of an answer."""

    @abstractmethod
    def made(self, draw: random.Random, level: int) -> Mapping[str, Json] | None:
        """Return the data of a random puzzle with the key `board`, or None if this board has no puzzle of the level."""

    @abstractmethod
    def after(self, task: Task, board: str, text: str) -> str | None:
        """Return the board after an answer, or None if the text contains no answer."""

    @abstractmethod
    def progress(self, task: Task, board: str) -> float:
        """Return the progress of a board in [0, 1], which is 1 only if the puzzle is solved."""


def read_answer(text: str) -> str:
    """Return the part of a message after the last mark, or the whole message if it has no mark."""
    return text[-READ:].rpartition(MARK)[2].strip()


class PuzzleState(BaseState):
    """The state of one puzzle. The agents act one after another, and the last one changes the board."""

    def __init__(self, puzzle: Puzzle, task: Task, agents: Sequence[str]) -> None:
        super().__init__(task, agents)
        self._puzzle = puzzle
        self._board = str(task.data["board"])
        self._turn = 1
        self._proposals: dict[str, str] = {}
        """The messages of the current turn, by agent."""
        self._best = dict.fromkeys(self.agents, 0.0)
        """The value of the best board that an agent's proposals lead to."""
        self._invalid = dict.fromkeys(self.agents, 0)

    def observe(self, agent: str) -> str:
        """Return the board and the proposals of the current turn."""
        full = self._puzzle.wording == "full"
        said = [f"{name}: {text}" if full else text for name, text in self._proposals.items()]
        turn = [f"Turn {self._turn} of {self._puzzle.turns}."] if full and self._turn > 1 else []
        return "\n".join([self._puzzle.head() + self._board, *turn, *said])

    def movers(self) -> tuple[str, ...]:
        """Return the next agent in team order."""
        return () if self.over else (self.agents[len(self._proposals)],)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Read the answer of the next agent. Raises EpisodeError if another agent acted."""
        need_movers(actions, self.movers())
        [(agent, text)] = actions.items()
        board = self._puzzle.after(self.task, self._board, text)
        self._invalid[agent] += board is None
        value, share = self._value(board or self._board), self._puzzle.local_reward
        if agent != self.agents[-1]:
            self._proposals[agent] = text[-READ:]
            gain = max(0.0, value - self._best[agent])
            self._best[agent] += gain
            return {agent: share * gain} if share else {}
        gain = value - self._value(self._board)
        self._board = board or self._board
        self._proposals = {}
        self._turn += 1
        solved = self._puzzle.progress(self.task, self._board) == 1.0
        self.over = solved or self._turn > self._puzzle.turns
        self.success = float(solved)
        self.rewards = dict.fromkeys(self.agents, 0.0) if self.over else {}
        return {**dict.fromkeys(self.agents, (1.0 - share) * gain), agent: gain}

    def _value(self, board: str) -> float:
        progress = self._puzzle.progress(self.task, board)
        return progress if self._puzzle.reward == "progress" else float(progress == 1.0)

    def outcome(self) -> Outcome:
        """Return the outcome. All rewards have been given during the episode."""
        info: dict[str, Json] = {
            "difficulty": self.task.data["difficulty"],
            "progress": self._puzzle.progress(self.task, self._board),
            "turns": self._turn - 1,
            "invalid": dict(self._invalid),
        }
        return Outcome(self.rewards, self.success or 0.0, info, truncated=not self.over)


# -------- Boards on which a player moves and pushes boxes: `#` wall, `-` floor, `@` player, `.` goal, `$` box, `*` box on a goal,
# `+` player on a goal, as in the usual notation of Sokoban. A path is a board without boxes, with its player on the goal at the end.

Cell = tuple[int, int]
Position = tuple[Cell, tuple[Cell, ...]]
"""The cell of the player, and the sorted cells of the boxes."""
MOVES: Mapping[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
_PLAN = re.compile(r"[UDLR\s,;\[\]\"']*")


@dataclass(frozen=True, slots=True)
class Room:
    """The fixed part of a board: the cells that are not walls, and the goals."""

    side: int
    free: frozenset[Cell]
    goals: frozenset[Cell]

    def solved(self, position: Position) -> bool:
        """Return whether all boxes are on goals or, on a board without boxes, whether the player is."""
        player, boxes = position
        return self.goals.issuperset(boxes or (player,))

    def moved(self, position: Position, move: str) -> Position:
        """Return the position after a move. It is unchanged if a wall or a box that cannot be pushed is in the way."""
        (row, column), boxes = position
        down, right = MOVES[move]
        to, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if to not in self.free or (to in boxes and (beyond not in self.free or beyond in boxes)):
            return position
        return to, tuple(sorted(beyond if box == to else box for box in boxes))

    def shown(self, position: Position) -> str:
        """Return the board as lines of characters."""
        player, boxes = position
        lines = []
        for row in range(self.side):
            line = ""
            for cell in [(row, column) for column in range(self.side)]:
                on_goal = cell in self.goals
                if cell == player:
                    line += "+" if on_goal else "@"
                elif cell in boxes:
                    line += "*" if on_goal else "$"
                else:
                    line += "." if on_goal else "-" if cell in self.free else "#"
            lines.append(line)
        return "\n".join(lines)


def read_board(board: str) -> tuple[Room, Position]:
    """Return the room and the position of a board. The inverse is `Room.shown`."""
    cells = {(r, c): mark for r, line in enumerate(board.split("\n")) for c, mark in enumerate(line)}
    room = Room(
        board.count("\n") + 1,
        frozenset(cell for cell, mark in cells.items() if mark != "#"),
        frozenset(cell for cell, mark in cells.items() if mark in ".*+"),
    )
    [player] = [cell for cell, mark in cells.items() if mark in "@+"]
    return room, (player, tuple(sorted(cell for cell, mark in cells.items() if mark in "$*")))


@lru_cache(maxsize=256)
def distances(room: Room, boxes: int) -> Mapping[Position, int]:
    """Return the number of moves of the shortest solution of every position from which the puzzle can be solved.

    A breadth-first search that starts at all solved positions and takes moves back.
    """
    ends = sorted(room.goals)
    if boxes:
        solved = [(cell, each) for each in combinations(ends, boxes) for cell in sorted(room.free - {*each})]
    else:
        solved = [(cell, ()) for cell in ends]
    found: dict[Position, int] = dict.fromkeys(solved, 0)
    edge = list(found)
    while edge:
        before: list[Position] = []
        for (row, column), own in edge:
            for down, right in MOVES.values():
                origin, pushed = (row - down, column - right), (row + down, column + right)
                if origin not in room.free or origin in own:
                    continue
                earlier: list[Position] = [(origin, own)]
                if pushed in own:
                    pulled = tuple(sorted((row, column) if box == pushed else box for box in own))
                    earlier.append((origin, pulled))
                for position in earlier:
                    if position not in found:
                        found[position] = found[(row, column), own] + 1
                        before.append(position)
        edge = before
    return found


class _Moving(Puzzle):
    """Base class of puzzles that are solved by a plan of moves."""

    slack: float = Field(default=2.0, ge=1.0)
    """The maximum number of moves of one plan, as a multiple of the length of the shortest solution. Later moves are ignored."""

    @abstractmethod
    def _room(self, draw: random.Random) -> tuple[Room, int]:
        """Return a random room and the number of its boxes."""

    def made(self, draw: random.Random, level: int) -> Mapping[str, Json] | None:
        """Return a random board whose shortest solution has `level` moves."""
        room, boxes = self._room(draw)
        starts = sorted(position for position, moves in distances(room, boxes).items() if moves == level)
        return {"board": room.shown(draw.choice(starts))} if starts else None

    def after(self, task: Task, board: str, text: str) -> str | None:
        """Return the board after a plan. The plan stops when the puzzle is solved."""
        plan = read_answer(text)
        if not _PLAN.fullmatch(plan):
            return None
        moves = [mark for mark in plan if mark in MOVES]
        room, position = read_board(board)
        for move in moves[: math.floor(self.slack * _left(str(task.data["board"])))]:
            if room.solved(position):
                break
            position = room.moved(position, move)
        return room.shown(position) if moves else None

    def progress(self, task: Task, board: str) -> float:
        """Return the share of the shortest solution that is no longer needed. It is 0 if the puzzle can no longer be solved."""
        return max(0.0, 1.0 - _left(board) / _left(str(task.data["board"])))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a shortest solution of the board that the agent read last, or random moves (`flaws`)."""
        size = str(task.data["board"]).count("\n") + 1
        lines = messages[-1].content.split("\n") if messages else []
        shown = [line for line in lines if len(line) == size and set(line) <= set("#-@.$*+")][:size]
        board = "\n".join(shown) if len(shown) == size else str(task.data["board"])
        if flawed(self.flaws, agent, seed):
            plan = random.Random(f"{seed}/{agent}/{board}").choices(
                list(MOVES), k=int(task.data["difficulty"])
            )
        else:
            plan = solution(board)
        return ("" if self.wording == "short" else f"{MARK} ") + "".join(plan)


def _left(board: str) -> float:
    room, position = read_board(board)
    return distances(room, len(position[1])).get(position, math.inf)


def solution(board: str) -> list[str]:
    """Return the moves of a shortest solution of a board. The list is empty if there is none."""
    room, position = read_board(board)
    left = distances(room, len(position[1]))
    moves = []
    for rest in reversed(range(int(left.get(position, 0)))):
        move = next(move for move in MOVES if left.get(room.moved(position, move)) == rest)
        position = room.moved(position, move)
        moves.append(move)
    return moves


class PlanPath(_Moving):
    """Paths from `@` to `.` on a square grid with walls. The difficulty is the length of the shortest path."""

    things: ClassVar[str] = "paths"
    name: Literal["plan_path"] = "plan_path"
    side: int = Field(default=10, ge=2, le=30)
    """The number of rows and columns."""
    difficulty: Difficulty = (2, 12)
    """The minimum and maximum length of the shortest path in moves."""
    walls: float = Field(default=0.22, ge=0.0, le=0.5)
    """The probability that a cell is a wall."""

    def rules(self) -> str:
        """Return the rules of the puzzle and the format of an answer."""
        return (
            "Find a way on the grid from @ to the goal. Each character is a cell: # wall, - floor, @ your position, . goal. "
            "Moves are U (up), D (down), L (left) and R (right).\n"
            f"End your message with {MARK} and your moves, for example: {MARK} RRD"
        )

    def _room(self, draw: random.Random) -> tuple[Room, int]:
        cells = [(r, c) for r in range(self.side) for c in range(self.side)]
        goal = draw.choice(cells)
        free = frozenset(cell for cell in cells if cell == goal or draw.random() >= self.walls)
        return Room(self.side, free, frozenset({goal})), 0


class Sokoban(_Moving):
    """Rooms in which a player pushes boxes onto goals. The difficulty is the number of moves of the shortest solution."""

    things: ClassVar[str] = "rooms of Sokoban"
    name: Literal["sokoban"] = "sokoban"
    side: int = Field(default=6, ge=4, le=8)
    """The number of rows and columns, including the walls at the border."""
    boxes: int = Field(default=1, ge=1, le=2)
    """The number of boxes, which is also the number of goals."""
    difficulty: Difficulty = (2, 10)
    """The minimum and maximum number of moves of the shortest solution."""
    walls: float = Field(default=0.1, ge=0.0, le=0.5)
    """The probability that a cell inside the room is a wall."""

    def rules(self) -> str:
        """Return the rules of the puzzle and the format of an answer."""
        return (
            "Push every box onto a goal. Each character is a cell: # wall, - floor, @ your position, . goal, $ box, * box on a "
            "goal, + you on a goal. Moves are U (up), D (down), L (left) and R (right). You push a box by moving into it if the "
            "cell behind it is free; boxes cannot be pulled.\n"
            f"End your message with {MARK} and your moves, for example: {MARK} RRD"
        )

    def _room(self, draw: random.Random) -> tuple[Room, int]:
        inner = [(r, c) for r in range(1, self.side - 1) for c in range(1, self.side - 1)]
        goals = draw.sample(inner, self.boxes)
        free = frozenset(cell for cell in inner if cell in goals or draw.random() >= self.walls)
        return Room(self.side, free, frozenset(goals)), self.boxes


# -------- Sudoku: lines of numbers, with `-` for an empty cell


class Sudoku(Puzzle):
    """Sudokus of 4×4 or 9×9 cells with a single solution. The difficulty is the number of empty cells."""

    things: ClassVar[str] = "sudokus"
    name: Literal["sudoku"] = "sudoku"
    side: Literal[4, 9] = 4
    """The number of rows and columns."""
    difficulty: Annotated[Difficulty, up_to(45)] = (4, 8)
    """The minimum and maximum number of empty cells: at most 10 of 16, or 45 of 81."""

    @model_validator(mode="after")
    def _enough_given(self) -> Sudoku:
        if self.side == 4 and self.difficulty[1] > 10:
            raise ValueError(
                f"`difficulty` goes up to {self.difficulty[1]}, but a sudoku of 4×4 cells has at most 10 empty cells"
            )
        return self

    def rules(self) -> str:
        """Return the rules of the puzzle and the format of an answer."""
        return (
            f"Fill in the empty cells (-) of the sudoku. Every row, column and block of {math.isqrt(self.side)}×"
            f"{math.isqrt(self.side)} cells must contain each number from 1 to {self.side} once.\n"
            f"End your message with {MARK} and all {self.side} rows, one per line."
        )

    def made(self, draw: random.Random, level: int) -> Mapping[str, Json] | None:
        """Return a random sudoku with `level` empty cells, or None if its solution would not be unique."""
        block = math.isqrt(self.side)
        # Rows and columns of a regular solution are shuffled within and between blocks, and numbers are renamed.
        rows, columns = (
            [
                band * block + line
                for band in draw.sample(range(block), block)
                for line in draw.sample(range(block), block)
            ]
            for _ in range(2)
        )
        names = draw.sample("123456789"[: self.side], self.side)
        solved = "".join(
            names[(block * (row % block) + row // block + column) % self.side]
            for row in rows
            for column in columns
        )
        cells = list(solved)
        empty = 0
        for place in draw.sample(range(len(cells)), len(cells)):
            if empty == level:
                break
            kept, cells[place] = cells[place], "-"
            if len(solutions("".join(cells), self.side, 2)) == 1:
                empty += 1
            else:
                cells[place] = kept
        if empty < level:
            return None
        return {"board": _lines("".join(cells), self.side), "solution": _lines(solved, self.side)}

    def after(self, task: Task, board: str, text: str) -> str | None:
        """Return the answer as the new board, or None if it is not a full board that keeps the given numbers."""
        answer = re.sub(r"[\s,;|\[\]]", "", read_answer(text))
        given = str(task.data["board"]).replace("\n", "")
        if len(answer) != len(given) or not set(answer) <= set("-123456789"[: self.side + 1]):
            return None
        if any(was not in ("-", now) for was, now in zip(given, answer, strict=True)):
            return None
        return _lines(answer, self.side)

    def progress(self, task: Task, board: str) -> float:
        """Return the share of the empty cells that have the correct number."""
        given, gold = str(task.data["board"]), str(task.data["solution"])
        empty = [place for place, mark in enumerate(given) if mark == "-"]
        return sum(board[place] == gold[place] for place in empty) / len(empty)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the solution, or the sudoku with random numbers in its empty cells (`flaws`)."""
        board = str(task.data["solution"])
        if flawed(self.flaws, agent, seed):
            draw = random.Random(f"{seed}/{agent}")
            given = str(task.data["board"])
            board = "".join(draw.choice("123456789"[: self.side]) if mark == "-" else mark for mark in given)
        return board if self.wording == "short" else f"{MARK}\n{board}"


def _lines(cells: str, size: int) -> str:
    return "\n".join(cells[k : k + size] for k in range(0, len(cells), size))


def solutions(cells: str, size: int, most: int) -> list[str]:
    """Return up to `most` solutions of a sudoku, given its cells row by row. The search fills the most constrained cell first."""
    choices: tuple[int, set[str]] | None = None
    for place, mark in enumerate(cells):
        if mark == "-":
            free = set("123456789"[:size]) - {cells[other] for other in _peers(size)[place]}
            if choices is None or len(free) < len(choices[1]):
                choices = place, free
    if choices is None:
        return [cells]
    found: list[str] = []
    for mark in sorted(choices[1]):
        found += solutions(cells[: choices[0]] + mark + cells[choices[0] + 1 :], size, most - len(found))
        if len(found) >= most:
            break
    return found


@lru_cache
def _peers(size: int) -> Sequence[frozenset[int]]:
    """Return for each cell the other cells of its row, column and block."""
    block = math.isqrt(size)

    def units(place: int) -> tuple[Any, ...]:
        row, column = divmod(place, size)
        return row, column, (row // block, column // block)

    return [
        frozenset(
            other
            for other in range(size * size)
            if other != place and any(a == b for a, b in zip(units(other), units(place), strict=True))
        )
        for place in range(size * size)
    ]
