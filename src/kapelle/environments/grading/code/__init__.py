"""Grade programs, from the text of a response to the verdict, and compare values and output outside the sandbox.

1. `programs.program_of` finds the program in a turn of a model.
2. `grade.grade_calls` and `grade.grade_output` run the program and compare its results. `grade.grade_program` does the same with
   test programs that `literal_tests` can convert to calls and `checks`. Other test programs run in the process of the graded
   program (`test_driver`) if this is allowed.
3. `candidate_driver` executes requests in the sandbox of the program, and `values` encodes values.
"""
