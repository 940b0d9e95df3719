"""Programs, from text to verdict, graded without letting a candidate near an expected value.

1. `programs.program_of` finds the program in a turn.
2. `grade.grade_program` starts two sandboxes, one with the candidate (`candidate_driver`) and one with the tests (`test_driver`), and passes
   messages between them. `grade_calls` and `grade_output` need the candidate's alone, and compare here.
3. In the tests' sandbox, `rewriting` changes the tests so that `rewritten_calls` decides where Python would not ask; `remote` stands for
   the candidate's objects, and asks it by message.
4. `values` is how all of them write values.
"""
