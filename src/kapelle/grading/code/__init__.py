"""Programs, graded without letting a candidate near an expected value."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
