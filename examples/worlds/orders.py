"""Code shared by the three environments of this folder: a shop's orders, and the criteria of a good answer."""

ITEMS = (
    *("tea", "milk", "rice", "soap", "figs", "salt", "corn", "jam", "oats", "plums"),
    *("beans", "bread", "dates", "flour", "honey", "lemons", "mint", "nuts", "peas", "sugar"),
)


def asked(item: str) -> str:
    """Return an order as shown to the team."""
    return f"Order: {item}"


def named(said: str, item: str) -> float:
    """Return 1 for an answer that contains the ordered item."""
    return float(item in said)


def polite(said: str) -> float:
    """Return 1 for an answer that says thanks."""
    return float("thanks" in said)
