from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.runs import map_item
from worker.runs.tree import Tree, tree_of


def leaves(tree: Tree, item: str) -> list[str]:
    joined = tree.children[item]
    return [leaf for child in joined for leaf in leaves(tree, child)] if joined else [item]


def depth(tree: Tree, item: str) -> int:
    return max((1 + depth(tree, child) for child in tree.children[item]), default=0)


@given(num_chunks=st.integers(1, 300), fan_in=st.integers(2, 64))
def test_the_final_item_stands_for_every_chunk_once_in_order(num_chunks: int, fan_in: int) -> None:
    tree = tree_of(num_chunks, fan_in)
    assert leaves(tree, tree.final) == [map_item(index) for index in range(num_chunks)]
    for item in tree.items:
        found = leaves(tree, item)
        assert found == [map_item(index) for index in tree.spans[item]]
        assert len(tree.children[item]) <= fan_in
        assert len(tree.children[item]) != 1  # a join of one would say the same again


@given(num_chunks=st.integers(1, 300), fan_in=st.integers(2, 64))
def test_the_depth_is_the_least_that_the_fan_in_allows(num_chunks: int, fan_in: int) -> None:
    tree = tree_of(num_chunks, fan_in)
    least = 0
    while fan_in**least < num_chunks:
        least += 1
    assert depth(tree, tree.final) == least


@given(num_chunks=st.integers(1, 300), fan_in=st.integers(2, 64))
def test_children_come_before_parents(num_chunks: int, fan_in: int) -> None:
    tree = tree_of(num_chunks, fan_in)
    place = {item: index for index, item in enumerate(tree.items)}
    assert all(place[child] < place[item] for item, joined in tree.children.items() for child in joined)
    assert len(tree.items) <= 2 * num_chunks - 1


def test_a_single_chunk_is_the_final_item() -> None:
    assert tree_of(1, 8).final == "map-0"


def test_sixty_chunks_are_joined_in_two_levels() -> None:
    tree = tree_of(60, 8)
    assert depth(tree, tree.final) == math.ceil(math.log(60, 8)) == 2
    sizes = [len(joined) for joined in tree.children.values() if joined]
    assert sorted(sizes) == [7, 7, 7, 7, 8, 8, 8, 8, 8]  # balanced: no join is left with a crumb


@pytest.mark.parametrize(("num_chunks", "fan_in"), [(0, 2), (5, 1)])
def test_nonsense_is_refused(num_chunks: int, fan_in: int) -> None:
    with pytest.raises(ValueError):
        tree_of(num_chunks, fan_in)
