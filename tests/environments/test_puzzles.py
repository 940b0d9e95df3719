"""Plan-Path, Sudoku and Sokoban: solvers against brute force, rewards by hand, and answers that mean harm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from kapelle.environments.puzzles import (
    MOVES,
    PlanPath,
    Puzzle,
    Sokoban,
    Sudoku,
    distances,
    read_board,
    solution,
    solutions,
)
from kapelle.rollout.conformance.driving import always, drive, scripted
from kapelle.types import Message, Task

PUZZLES = (
    PlanPath(),
    PlanPath(side=3, difficulty=(1, 4), wording="short"),
    Sudoku(),
    Sudoku(side=9, difficulty=(10, 30), wording="short"),
    Sokoban(),
    Sokoban(boxes=2, wording="short"),
)
TEAM = ("planner", "executor")


def a_task(board: str, difficulty: int) -> Task:
    return Task("train-0", board, {"board": board, "difficulty": difficulty})


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: f"{puzzle.name} {puzzle.wording}")
class TestEveryPuzzle:
    async def test_only_the_solution_receives_the_full_reward(self, puzzle: Any) -> None:
        for index in range(8):
            task = puzzle.task("train", index)
            solved = await drive(puzzle, task, TEAM, scripted(puzzle, task))
            assert solved.returns == {"planner": 1.0, "executor": 1.0}
            assert solved.outcome.success == 1.0
            assert solved.outcome.info["turns"] == 1
            mirrored = {"U": "D", "D": "U", "L": "R", "R": "L"}
            first = puzzle.script("executor", task, [], 0).rpartition("####")[2].strip()
            wrong = "".join(mirrored.get(mark, mark) for mark in first)
            if isinstance(puzzle, Sudoku):
                wrong = first.translate(str.maketrans("12", "21"))
            failed = await drive(puzzle, task, TEAM, always(wrong))
            assert failed.outcome.success == 0.0
            assert all(0.0 <= reward < 1.0 for reward in failed.returns.values())

    def test_tasks_repeat_and_splits_are_disjoint(self, puzzle: Any) -> None:
        count = 6 if puzzle.side == 9 else 40
        boards = {
            split: [puzzle.task(split, k).data["board"] for k in range(count)] for split in ("train", "test")
        }
        assert boards["train"] == [puzzle.task("train", k).data["board"] for k in range(count)]
        assert not set(boards["train"]) & set(boards["test"])
        other = puzzle.model_copy(update={"seed": 1})
        assert [other.task("train", k).data["board"] for k in range(count)] != boards["train"]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "####",
            "UDLR" * 50_000,
            "1234" * 50_000,
            "#### " * 50_000,
            "ＵＤＬＲ ①② ١٢٣ \u202e\x00\ud800",
            "#### [1e999, NaN, __import__('os').system('true')]",
            "solved. success: 1.0\n<think>",
            "1\n" * 9 + "0",
        ],
    )
    async def test_hostile_answers_are_ordinary_incorrect_answers(self, puzzle: Any, text: str) -> None:
        task = next(task for k in range(99) if _far(task := puzzle.task("train", k)))
        episode = await drive(puzzle, task, TEAM, always(text))
        assert episode.outcome.success == 0.0
        assert all(0.0 <= reward < 1.0 for reward in episode.returns.values())
        assert episode.outcome.info["turns"] == puzzle.turns
        state = puzzle.start(task, TEAM, 0)
        await state.step({"planner": text})
        assert len(state.observe("executor")) < 4_000


def _far(task: Task) -> bool:
    """Return whether walking up, down, left and right again and again does not solve the puzzle."""
    board = task.data["board"]
    if "@" not in board and "+" not in board:
        return True
    room, position = read_board(board)
    for move in "UDLR" * 20:
        position = room.moved(position, move)
        if room.solved(position):
            return False
    return True


class TestPaths:
    async def test_progress_is_the_share_of_the_path_by_hand(self) -> None:
        puzzle = PlanPath(side=3, wording="short", turns=2)
        task = a_task("@--\n##-\n.--", 6)
        state = puzzle.start(task, ("executor",), 0)
        assert await state.step({"executor": "RRD"}) == {"executor": 0.5}
        assert state.observe("executor") == "---\n##@\n.--"
        assert await state.step({"executor": "[\"D\", 'L', 'L', 'U']"}) == {"executor": 0.5}
        assert (state.movers(), state.outcome().success) == ((), 1.0)

    def test_walls_stop_and_long_walks_are_cut(self) -> None:
        puzzle = PlanPath(side=3, slack=1.0)
        task = a_task("@--\n##-\n.--", 6)
        assert puzzle.after(task, task.data["board"], "I go down. #### D") == task.data["board"]
        assert puzzle.after(task, task.data["board"], "RLRRDDLL") == "---\n##-\n.-@"
        assert puzzle.after(task, task.data["board"], "right, then down") is None

    async def test_proposals_are_read_and_rewarded(self) -> None:
        puzzle = PlanPath(side=3, wording="short", local_reward=0.5)
        state = puzzle.start(a_task("@--\n##-\n.--", 6), TEAM, 0)
        assert await state.step({"planner": "RRDD"}) == {"planner": pytest.approx(0.5 * 4 / 6)}
        assert state.observe("executor") == "@--\n##-\n.--\nRRDD"
        assert await state.step({"executor": "RR"}) == {
            "planner": pytest.approx(0.5 / 3),
            "executor": pytest.approx(1 / 3),
        }
        # The second proposal reaches no board that is better than the first one's.
        assert await state.step({"planner": "D"}) == {"planner": 0.0}

    def test_the_script_goes_on_from_the_board_that_it_reads(self) -> None:
        puzzle = PlanPath(side=3)
        task = a_task("@--\n##-\n.--", 6)
        read = Message("user", f"{puzzle.head()}---\n##@\n.--\nTurn 2 of 4.\nplanner: #### D")
        assert puzzle.script("executor", task, [read], 0) == "#### DLL"


class TestSokoban:
    @pytest.mark.parametrize(
        ("board", "moves"),
        [
            ("#####\n#@$.#\n#---#\n#---#\n#####", ["R"]),
            ("#####\n#-@-#\n#-$-#\n#-.-#\n#####", ["D"]),
            ("#####\n#$@.#\n#---#\n#---#\n#####", []),  # a box in a corner
        ],
    )
    def test_solutions_by_hand(self, board: str, moves: list[str]) -> None:
        assert solution(board) == moves

    def test_a_dead_end_has_no_progress(self) -> None:
        puzzle = Sokoban(side=5, wording="short")
        task = a_task("#####\n#---#\n#@$-#\n#.--#\n#####", 5)
        board = puzzle.after(task, task.data["board"], "R")
        assert board == "#####\n#---#\n#-@$#\n#.--#\n#####"
        assert board is not None
        assert puzzle.progress(task, board) == 0.0

    @pytest.mark.parametrize("boxes", [1, 2])
    def test_distances_equal_a_search_from_the_start(self, boxes: int) -> None:
        for index in range(10):
            board = Sokoban(boxes=boxes, walls=0.2).task("train", index).data["board"]
            room, start = read_board(board)
            edge, steps = {start}, 0
            seen = set(edge)
            while not any(room.solved(position) for position in edge):
                edge = {room.moved(position, move) for position in edge for move in MOVES} - seen
                seen |= edge
                steps += 1
            assert distances(room, boxes)[start] == steps == len(solution(board))


@pytest.mark.parametrize("side", [4, 9])
def test_sudokus_have_one_solution_that_keeps_the_rules(side: int) -> None:
    block = int(side**0.5)
    for index in range(6):
        data: Mapping[str, Any] = Sudoku(side=side, difficulty=(8, 10)).task("test", index).data
        rows = data["solution"].split("\n")
        assert solutions(data["board"].replace("\n", ""), side, 5) == ["".join(rows)]
        assert data["board"].count("-") == data["difficulty"]
        numbers = set("123456789"[:side])
        squares = [
            "".join(row[c : c + block] for row in rows[r : r + block])
            for r in range(0, side, block)
            for c in range(0, side, block)
        ]
        columns = ["".join(column) for column in zip(*rows, strict=True)]
        assert all(set(unit) == numbers for unit in [*rows, *columns, *squares])


async def test_a_sudoku_rewards_correct_cells_and_keeps_given_numbers() -> None:
    puzzle = Sudoku(wording="short", reward="progress")
    board, gold = "-234\n341-\n2143\n-321", "1234\n3412\n2143\n4321"
    task = Task("train-0", board, {"board": board, "solution": gold, "difficulty": 3})
    state = puzzle.start(task, ("executor",), 0)
    assert puzzle.after(task, board, board.replace("2143", "2134")) is None
    [(_, reward)] = (await state.step({"executor": "1 2 3 4\n3 4 1 1\n2 1 4 3\n- 3 2 1"})).items()
    assert reward == pytest.approx(1 / 3)
    assert await state.step({"executor": gold}) == {"executor": pytest.approx(2 / 3)}
    assert state.outcome().success == 1.0


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValidationError, match="at most 10 empty cells"):
        Sudoku(difficulty=(4, 12))
    far: Puzzle = PlanPath(side=2, difficulty=(7, 7))
    with pytest.raises(Exception, match="no puzzle of difficulty 7"):
        far.task("train", 0)
