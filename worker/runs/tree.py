"""How a document's chunks become one summary: a tree of items, the same for the same number of chunks. Pure.

map-0 map-1 map-2   map-3 map-4      chunks
    reduce-1-0       reduce-1-1      joins of at most `fan_in`
             reduce-2-0              the final item: it writes the document's summary
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from infra.runs import map_item, reduce_item


@dataclass(frozen=True, slots=True)
class Tree:
    children: dict[str, tuple[str, ...]]  # item -> what it joins, in the document's order; () for a chunk
    spans: dict[str, range]  # item -> numbers of the chunks it stands for
    final: str

    @property
    def items(self) -> list[str]:
        """Children before parents, left before right."""
        return list(self.children)


@lru_cache(maxsize=256)
def tree_of(num_chunks: int, fan_in: int) -> Tree:
    """The tree over `num_chunks` chunks. Its depth is the least that `fan_in` allows; its joins are balanced.

    A single chunk is summarized directly: it is the final item.
    """
    if num_chunks < 1 or fan_in < 2:
        raise ValueError(f"no tree over {num_chunks} chunks with a fan-in of {fan_in}")
    level = [map_item(index) for index in range(num_chunks)]
    children: dict[str, tuple[str, ...]] = dict.fromkeys(level, ())
    spans = {item: range(index, index + 1) for index, item in enumerate(level)}
    depth = 0
    while len(level) > 1:
        depth += 1
        above: list[str] = []
        num_groups = -(-len(level) // fan_in)
        for index in range(num_groups):
            group = level[index * len(level) // num_groups : (index + 1) * len(level) // num_groups]
            if len(group) == 1:  # nothing to join here: it waits for the level above
                above.append(group[0])
                continue
            item = reduce_item(depth, index)
            children[item] = tuple(group)
            spans[item] = range(spans[group[0]].start, spans[group[-1]].stop)
            above.append(item)
        level = above
    return Tree(children, spans, final=level[0])
