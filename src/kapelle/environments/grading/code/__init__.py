"""Grading of programs, from text to verdict. Returned values and output are compared outside the sandbox.

1. `programs.program_of` finds the program in a turn.
2. `grade.grade_calls` and `grade.grade_output` run the program and compare its results. `grade.grade_program` does the same with
   test programs that `literal_tests` can turn into calls and `checks`. Other test programs run in the process of the graded
   program (`test_driver`), if that is allowed.
3. `candidate_driver` executes requests in the program's sandbox; `values` encodes values.
"""
