"""The judge of MT-Bench: single-answer grading from 1 to 10 (arXiv:2306.05685, section 3.2 and figures 6, 8 and 10).

The first answer is graded on its own, and the second answer with the whole conversation. Questions on math, reasoning and coding have
reference answers. The rating is the first number in double brackets, or else in single brackets, as in FastChat's `llm_judge`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.environments.grading.judge import Ask
from kapelle.environments.grading.text.extraction import own_turn
from kapelle.environments.grading.verdict import Grade, ungraded
from kapelle.errors import DataError
from kapelle.runtime.row_files import read_rows
from kapelle.types import Message

WITH_REFERENCE = ("math", "reasoning", "coding")
"""The categories whose answers are compared with a reference answer."""
_RATING = (re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]"))

_TASK = (
    "You are an impartial judge. Grade how well an AI assistant answers {what}. {how} First explain your judgement in a few "
    'sentences. Then write the grade, a number from 1 to 10, in exactly this form: "[[rating]]". Example: "Rating: [[5]]".'
)
_QUALITY = "Consider helpfulness, relevance, accuracy, depth, creativity and level of detail. Be objective."
_CORRECT = "Consider correctness and helpfulness. Compare the answer with the reference answer, and name each mistake. Be objective."
_ONE, _SECOND = "the question of a user", "the second question of a user; the first answer is only context"
_TURN = "### User:\n{{question_{0}}}\n\n### {1}:\n{{{2}_{0}}}\n\n"
_TALK = "<|Start of the conversation|>\n\n{}<|End of the conversation|>".format(
    _TURN.format(1, "Assistant", "answer") + _TURN.format(2, "Assistant", "answer")
)
_KNOWN = "<|Start of the reference answers|>\n\n{}<|End of the reference answers|>\n\n\n".format(
    _TURN.format(1, "Reference answer", "ref_answer") + _TURN.format(2, "Reference answer", "ref_answer")
)
_ANSWER = "[Start of the assistant's answer]\n{answer}\n[End of the assistant's answer]"
_REFERENCE = "[Start of the reference answer]\n{ref_answer_1}\n[End of the reference answer]\n\n"

Prompts = Mapping[str, tuple[str, str]]
"""Mapping from the name of a judge prompt to its system message and its template. The names and fields are those of FastChat."""
PROMPTS: Prompts = {
    "single-v1": (_TASK.format(what=_ONE, how=_QUALITY), f"[Question]\n{{question}}\n\n{_ANSWER}"),
    "single-math-v1": (
        _TASK.format(what=_ONE, how=_CORRECT),
        f"[Question]\n{{question}}\n\n{_REFERENCE}{_ANSWER}",
    ),
    "single-v1-multi-turn": (_TASK.format(what=_SECOND, how=_QUALITY), _TALK),
    "single-math-v1-multi-turn": (_TASK.format(what=_SECOND, how=_CORRECT), _KNOWN + _TALK),
}
"""Judge prompts in our own words with the structure of the published ones. `judge_prompts` reads the published ones from a file."""


def read_prompts(file: str | None) -> Prompts:
    """Return the judge prompts in a file with the format of FastChat's `judge_prompts.jsonl`, or `PROMPTS` if `file` is None."""
    if file is None:
        return PROMPTS
    rows = {str(row.fields.get("name")): row.fields for row in read_rows(Path(file).expanduser())}
    try:
        return {name: (rows[name]["system_prompt"], rows[name]["prompt_template"]) for name in PROMPTS}
    except KeyError as missing:
        raise DataError(
            f"'{file}' lacks {missing} of a judge prompt. Use `judge_prompts.jsonl` of FastChat, or remove `judge_prompts`."
        ) from None


async def rate(
    ask: Ask, prompts: Prompts, questions: Sequence[str], answers: Sequence[str], references: Sequence[str]
) -> Grade:
    """Return the judge's rating of the last answer, divided by 10. Without a rating from 1 to 10, the answer is ungraded."""
    answers = [own_turn(answer).strip() for answer in answers]
    known = references[: len(answers)] if len(references) >= len(answers) else ()
    name = f"single{'-math' if known else ''}-v1{'-multi-turn' if len(answers) > 1 else ''}"
    system, template = prompts[name]
    numbered = {
        f"{field}_{number}": text
        for field, texts in (("question", questions), ("answer", answers), ("ref_answer", known))
        for number, text in enumerate(texts, start=1)
    }
    request = template.format(question=questions[0], answer=answers[0], **numbered)
    reply = await ask([Message("system", system), Message("user", request)])
    found = _RATING[0].search(reply) or _RATING[1].search(reply)
    rating = float(found[1]) if found else 0.0
    if not 1.0 <= rating <= 10.0:
        return ungraded(answers[-1], f"The judge gave no rating from 1 to 10: {reply[-80:]!r}")
    return Grade(rating / 10.0, answers[-1], f"The judge's rating is {rating:g} of 10 ({name}).")
