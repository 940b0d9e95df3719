"""Grade mathematical answers, from the text of a response to the verdict.

1. `grade.read_math` finds the final answer of a text (`grading.text.extraction`).
2. `notation.tidy` rewrites equivalent notations to a single notation, by replacing characters only.
3. `answers.read_answer` determines the kind of an answer (list, set, interval, matrix, equation, …). `numeric` separates the name,
   the unit and the words from a value; `expression.read_expression` parses each value into the exact form of `algebra`.
4. `sameness.same_answer` compares the parsed answer with the parsed gold answer.
5. Answers that this parser cannot read are compared by math-verify in a process that can be killed (`grade.compare_math`, `worker`).

`numeric` also parses single numbers for graders that do not evaluate expressions.
"""
