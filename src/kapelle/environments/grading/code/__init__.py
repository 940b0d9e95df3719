"""Programs, from text to verdict. What a program returns or prints is compared outside its sandbox.

1. `programs.program_of` finds the program in a turn.
2. `grade.grade_calls` and `grade.grade_output` run it and compare. `grade.grade_program` does so for test programs that `literal_tests` can
   read as calls; `checks` are what is left of them. Others run beside the program (`test_driver`), where that is allowed.
3. `candidate_driver` answers for the program in its sandbox; `values` is how values are written.
"""
