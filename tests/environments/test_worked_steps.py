from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapelle.environments.grading.math.calculation import decimal, parse_expression, work_out
from kapelle.environments.gsm8k_steps import add_up, forget_last_term, notes

# step, worked notes, answer, notes without their last term, answer without carrying
WORKED = [
    ("5*6", "30", "30", "30", "30"),
    ("7*48", "280+56", "336", "280", "236"),
    ("48*7", "280+56", "336", "280", "236"),
    ("23*45", "920+115", "1035", "920", "1035"),
    ("20*30", "600", "600", "600", "600"),
    ("47+85", "120+12", "132", "120", "132"),
    ("15+9+8", "10+22", "32", "10", "32"),
    ("85-47", "40-2", "38", "40", "48"),
    ("100-37", "100-30-7", "63", "100-30", "173"),
    ("5-5", "0", "0", "0", "0"),
    ("5-8", "-3", "-3", "-3", "-3"),
    ("48/2", "20+4", "24", "20", "24"),
    ("252/12", "20+1", "21", "20", "21"),
    ("5/2", "2+0.5", "2.5", "2", "2.5"),
    ("1.5+2.75", "3+1.2+0.05", "4.25", "3+1.2", "4.25"),
    ("5*20/100", "100/100=1", "1", "100/100=1", "1"),
    ("3*4+5", "12+5=10+7", "17", "12+5=10", "17"),
    ("2*(3+4)", "2*7=14", "14", "2*7=14", "14"),
    ("4*(10-2)/8", "4*8/8=32/8=4", "4", "4*8/8=32/8=4", "4"),
    ("1/2*30+1/2*40", "0.5*30+0.5*40=15+20=30+5", "35", "0.5*30+0.5*40=15+20=30", "35"),
    ("12*(1/3)", "4", "4", "4", "4"),
    ("560//10", "50+6", "56", "50", "56"),
]


@pytest.mark.parametrize(("step", "worked", "answer", "forgotten", "uncarried"), WORKED)
def test_worked_examples(step: str, worked: str, answer: str, forgotten: str, uncarried: str) -> None:
    expression = parse_expression(step)
    assert expression is not None
    assert notes(expression) == worked
    assert add_up(worked, carry=True) == answer
    assert forget_last_term(worked) == forgotten
    assert add_up(worked, carry=False) == uncarried


NUMBER = st.one_of(st.integers(0, 9999).map(str), st.integers(1, 999).map(lambda n: f"{n / 100:.2f}"))


@given(st.lists(st.tuples(st.sampled_from("+-*"), NUMBER), max_size=4), NUMBER)
def test_the_sum_of_the_notes_is_the_value_of_the_step(rest: list[tuple[str, str]], first: str) -> None:
    expression = parse_expression(first + "".join(operator + number for operator, number in rest))
    assert expression is not None
    value = work_out(expression)
    assert value is not None
    worked = notes(expression)
    assert add_up(worked, carry=True) == decimal(value)
    assert set(worked) <= set("0123456789.+-*/()=")


@pytest.mark.parametrize("written", ["", "x", "2*3", "=", "1+", "12=", "1 2"])
def test_unreadable_notes_give_no_answer(written: str) -> None:
    assert add_up(written, carry=True) == "?"
    assert add_up(written, carry=False) == "?"
    assert forget_last_term(written) == written
