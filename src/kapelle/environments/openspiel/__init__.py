"""Games of OpenSpiel (1908.09453)."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
