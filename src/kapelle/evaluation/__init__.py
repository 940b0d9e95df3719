"""How good a team is, and compared with what."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
