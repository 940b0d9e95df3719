"""Playing episodes: tasks in, groups of episodes out."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
