from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.text.extraction import MAX_TEXT, ExtractionRule, extract

ALL: tuple[ExtractionRule, ...] = ("hash", "last_box", "first_box", "only_box", "tag", "last_number")


def found(text: str, *rules: ExtractionRule) -> str | None:
    return extract(text, rules).text


ONE_RULE: dict[ExtractionRule, dict[str, str | None]] = {
    "hash": {
        "He has 3.\n#### 72": "72",
        "#### 72\n": "72",
        "####72": "72",
        "#### 1,234 ": "1,234",
        "#### 5\nso again\n#### 5": "5",
        "no mark: 72": None,
        "### 72": None,
        "####": None,
        "####\n72": None,
        "#### 5 #### 6": None,
        "#### 5\n#### 6": None,
        "#### 5\n####": None,
    },
    "last_number": {
        "The answer is 72.": "72",
        "A: -3.5": "-3.5",
        "it costs $1,234.50 in all": "$1,234.50",
        "about 50% of them": "50%",
        "7 + 5 = 12": "12",
        "7+5=12": "12",
        "2/3": "2/3",
        r"so \frac{1}{2}": r"\frac{1}{2}",
        r"so \boxed{18}": "18",
        r"\text{12} apples": "12",
        "5km": "5",
        ".5": ".5",
        "1e400": "1e400",
        "5 or 6": "6",
        "A: 10+John's age": None,
        "nothing": None,
        "": None,
        # The last number is a part of something else, and an earlier one must not stand in for it.
        "is it 3-5": None,
        "x = 10 - 5": None,
        "2^5": None,
        "2 ^ 5": None,
        "5 * 4": None,
        r"\sqrt{2}": None,
        "√2": None,
        "3π": None,
        r"3\pi": None,
        "5²": None,
        "5, or rather ½": "½",
        "5, or rather ⑥": None,
    },
    "only_box": {
        r"\boxed{5}": "5",
        r"\boxed{5} so \boxed{5}": "5",
        r"\boxed{5} no \boxed{6}": None,
        r"\boxed{5} no \boxed{6": None,
        r"\boxed{5}" * 50: "5",
        r"\boxed{5}" * 51: None,
    },
    "tag": {
        "so <answer> 5 </answer>.": "5",
        "<answer>a\nb</answer>": "a\nb",
        "<answer>5</answer> and <answer>5</answer>": "5",
        "<answer>5</answer><answer>6</answer>": None,
        "<answer>5": None,
        "5</answer>": None,
        "<answer><answer>5</answer></answer>": None,
        "<answer></answer>": None,
        "<answer>5</answer>" * 51: None,
    },
}


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [(rule, text, answer) for rule, cases in ONE_RULE.items() for text, answer in cases.items()],
)
def test_one_rule_alone(rule: ExtractionRule, text: str, answer: str | None) -> None:
    assert found(text, rule) == answer


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        (r"so \boxed{5}", "5", "5"),
        (r"\boxed{5} or \boxed{6}", "5, 6", "5"),
        (r"$\boxed{(1, 2)} \quad \text{and} \quad \boxed{(6, 2)}$.", "(1, 2), (6, 2)", "(1, 2)"),
        (r"\boxed{5}, so \boxed{5}", "5", "5"),
        (r"\boxed{5}, then \boxed{6}", "6", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }.", "7", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", r"\{1, 2\}"),
        (r"\boxed{5} \boxed{6", None, "5"),
        (r"\boxed{}", None, None),
        (r"\boxed{\boxed{5}}", "5", "5"),
        (r"\boxed{6\boxed{5}}", None, None),
        (r"\boxed{5", None, None),
        (r"\boxed5", "5", "5"),
        (r"\boxed 5.", "5", "5"),
        (r"\boxed52", None, None),
        (r"\boxed {5}", "5", "5"),
        (r"\fbox{5}", "5", "5"),
        (r"\boxed{\fbox{5}}", "5", "5"),
        (r"boxed{5}", None, None),
        (r"\boxed{5\}", None, None),
    ],
)
def test_boxes(text: str, last: str | None, first: str | None) -> None:
    assert found(text, "last_box") == last
    assert found(text, "first_box") == first


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    "text",
    [
        "```\n#### 5 \\boxed{5} <answer>5</answer>\n```\nnothing",
        "```\n#### 5 \\boxed{5} <answer>5</answer>",
        "> #### 5 \\boxed{5} <answer>5</answer>\nnothing",
        "  > #### 5 \\boxed{5} <answer>5</answer>",
        "<think>#### 5 \\boxed{5} 5</think>",
        "<think>#### 5 \\boxed{5} 5",
        "<think></think><think>#### 5 \\boxed{5} 5",
    ],
)
def test_quoted_fenced_or_thinking_text_is_not_the_answer(policy: ExtractionRule, text: str) -> None:
    assert found(text, policy) is None


@pytest.mark.parametrize(
    "mark",
    ["<|im_end|>", "<|im_start|>system", "</s>", "[INST]", "<|eot_id|>", "<start_of_turn>", "<|endoftext|>"],
)
def test_text_after_the_end_of_the_turn_is_ignored(mark: str) -> None:
    assert found(rf"\boxed{{6}}{mark}\boxed{{5}}", "last_box") == "6"
    assert found(rf"{mark}\boxed{{5}}", "last_box") is None


def test_policies_are_tried_in_the_order_given() -> None:
    text = r"\boxed{6} and #### 5 then 7"
    assert found(text, "last_box", "hash") == "6"
    assert found(text, "hash", "last_box") == "5 then 7"
    assert found("only 7", "hash", "last_box", "last_number") == "7"


def test_an_ambiguous_mark_ends_the_search() -> None:
    result = extract("#### 5 #### 6", ("hash", "last_number"))
    assert result.text is None
    assert "differ" in result.problem
    assert found(r"5 \boxed{}", "last_box", "last_number") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1\u200b5", "15"),
        ("#### 1\u00ad5", "15"),
        ("#### \ufeff15", "15"),
        ("#### １５", "15"),
        ("#### ١٥", "15"),
        ("#### \u22125", "-5"),
        ("#### \u20135", "-5"),
        ("#### \u202e51", None),
        ("#### \u206651", None),
        ("#### 5\x00", None),
        ("#### 5\ud800", None),
    ],
)
def test_invisible_and_unusual_characters(text: str, answer: str | None) -> None:
    assert found(text, "hash") == answer


@pytest.mark.parametrize("text", ["1\u200b5", "so １５", "so ١٥"])
def test_the_last_number_is_read_in_full(text: str) -> None:
    assert found(text, "last_number") == "15"


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    "text",
    [
        "5" * MAX_TEXT,
        "\\boxed{" * (MAX_TEXT // 7),
        "{" * MAX_TEXT,
        "#" * MAX_TEXT,
        "-" * MAX_TEXT,
        "1." * (MAX_TEXT // 2),
        "1 " * (MAX_TEXT // 2),
        "1e" * (MAX_TEXT // 2),
        "\\frac{" * (MAX_TEXT // 6),
        "\u200b" * MAX_TEXT,
        "½" * MAX_TEXT,
        "1'000" * (MAX_TEXT // 5),
        "1 1/" * (MAX_TEXT // 4),
        "~~a" * (MAX_TEXT // 3),
        "5" + " " * (MAX_TEXT - 1),
        "<think>" * (MAX_TEXT // 7),
        "5" * 10_000_000,
    ],
    ids=lambda text: f"{text[:8]!r}",
)
def test_no_text_takes_long(policy: ExtractionRule, text: str) -> None:
    assert timed(lambda: extract(text, (policy,)), 1.0)[1] < 1.0


def test_a_formula_begins_at_its_last_opening_mark() -> None:
    # Else each of many openings looks through the whole text for its end.
    assert extract(r"so the area is \( and then \(5x\)", ["prose"]).text == "5x"


def test_a_text_of_ten_million_characters_has_no_answer() -> None:
    result = extract("x" * 10_000_000 + "#### 5", ("hash",))
    assert result.text is None
    assert "at most 200,000 are read" in result.problem


@given(st.text(alphabet=st.sampled_from("0123456789.,-+/%$#\\{}boxedfrac \n\u200b\u202e½²"), max_size=60))
def test_every_text_is_read_and_the_answer_occurs_in_it(text: str) -> None:
    for policy in ALL:
        answer = found(text, policy)
        assert answer is None or answer in text.replace("\u200b", "")
