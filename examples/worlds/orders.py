"""What the three episode states of this folder have in common: a shop's orders, and what a good answer says."""

ITEMS = (
    *("tea", "milk", "rice", "soap", "figs", "salt", "corn", "jam", "oats", "plums"),
    *("beans", "bread", "dates", "flour", "honey", "lemons", "mint", "nuts", "peas", "sugar"),
)


def asked(item: str) -> str:
    """Return an order as the team reads it."""
    return f"Order: {item}"


def named(said: str, item: str) -> float:
    """Return 1 for an answer that names what was ordered."""
    return float(item in said)


def polite(said: str) -> float:
    """Return 1 for an answer that thanks."""
    return float("thanks" in said)
