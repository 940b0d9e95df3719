"""Mathematical answers, from text to verdict.

1. `grade.read_math` finds the final answer of a text (`grading.text.extraction`).
2. `notation.tidy` converts different spellings of the same mathematics into one spelling, by rewriting characters only.
3. `answers.read_answer` decides what kind of answer it is (list, set, interval, matrix, equation, …). `numeric` removes the
   answer's name, unit and words; `expression.read_expression` parses each value into exact `algebra`.
4. `sameness.same_answer` compares the parsed answer with the parsed gold answer.
5. Answers that this reader cannot parse go to math-verify, in a process that can be killed (`grade.compare_math`, `worker`).

`numeric` also reads single numbers, for graders that evaluate no expressions.
"""
