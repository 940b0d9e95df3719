from pathlib import Path


def test_names_are_sorted() -> None:
    assert Path("/app/sorted.txt").read_text().split() == ["ana", "leo", "mira"]


def test_the_list_stays() -> None:
    assert Path("/app/names.txt").read_text().split() == ["mira", "ana", "leo", "ana"]
