from types import MappingProxyType

from kapelle.runtime.tensors import leaves


def test_leaves_come_in_order_with_their_paths() -> None:
    tree = {"b": [1, (2.0, None)], "a": MappingProxyType({0: "text"}), "empty": {}}
    assert list(leaves(tree)) == [("b.0", 1), ("b.1.0", 2.0), ("b.1.1", None), ("a.0", "text")]


def test_a_prefix_precedes_every_path_and_names_a_lone_leaf() -> None:
    assert list(leaves([3], "part")) == [("part.0", 3)]
    assert list(leaves(3, "part")) == [("part", 3)]
