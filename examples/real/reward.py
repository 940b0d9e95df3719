"""The reward of the team in `team.yaml`."""


def right(completion: str, answer: str) -> float:
    """Return 1 for the word's correct sentiment, else 0."""
    return float(completion.strip() == answer)
