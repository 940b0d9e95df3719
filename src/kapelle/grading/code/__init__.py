"""Programs, graded without letting a candidate near an expected value."""
