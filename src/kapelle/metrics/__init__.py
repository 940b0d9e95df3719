"""Numbers about a step: what is counted, how certain it is, where the time went."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
