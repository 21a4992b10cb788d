"""Finds the blocks of a prefix that was computed before. Pure.

The hash of a full block is SHA-256 over the hash of the block before it and its own tokens; the chain starts from the
salt and the adapter, so two domains share nothing:

    root = H(salt, adapter)    h0 = H(root, tokens[0:B])    h1 = H(h0, tokens[B:2B])    ...

A block is registered only once its tokens are committed. Of a prompt that is cached to its end, the last block is
computed again, since its last token's logits are needed.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.block_pool import BlockPool
    from engine.host_store import HostStore
    from engine.sequence import Sequence


class PrefixCache:
    """Over a pool and, where `second_tier`, the host store. Disabled, it finds and keeps nothing."""

    def __init__(self, pool: BlockPool, host: HostStore, *, enabled: bool, second_tier: bool) -> None:
        self.enabled = enabled
        self.second_tier = second_tier
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._host = host

    def match(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], list[bytes]]:
        """The longest cached prefix of the first `num_tokens` tokens that leaves at least one of them to compute.

        Returns its device blocks and, behind them, the hashes of blocks that the host store has. Nothing is held yet.
        A request for prompt_logprobs finds nothing, since it needs the logits of every prompt token.
        """
        if not self.enabled or sequence.request.params.prompt_logprobs is not None:
            return [], []
        hashes = self.hashes(sequence, (num_tokens - 1) // self._pool.block_size)
        blocks: list[int] = []
        for content_hash in hashes:
            block = self._pool.lookup(content_hash)
            if block is None:
                break
            blocks.append(block)
        on_host: list[bytes] = []
        if self.second_tier:
            for content_hash in hashes[len(blocks) :]:
                if self._host.get(content_hash) is None:
                    break
                on_host.append(content_hash)
        return blocks, on_host

    def register(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks findable, as far as they are computed and committed."""
        if not self.enabled:
            return
        num_full = sequence.num_computed_tokens // self._pool.block_size
        if num_full <= sequence.num_registered_blocks:
            return
        hashes = self.hashes(sequence, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            self._pool.register(sequence.block_table[index], hashes[index])
        sequence.num_registered_blocks = num_full

    def count(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens

    def hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the sequence's first `count` blocks, which its tokens must fill."""
        known = sequence.block_hashes
        size = self._pool.block_size
        for index in range(len(known), count):
            parent = known[-1] if known else _root(sequence.request.salt, sequence.request.adapter)
            tokens = array("I", sequence.tokens(index * size, (index + 1) * size))
            known.append(sha256(parent + tokens.tobytes()).digest())
        return known[:count]


@lru_cache(maxsize=4096)
def _root(salt: str, adapter: str) -> bytes:
    """Each text hashed on its own first, so that no two pairs run together."""
    return sha256(b"".join(sha256(text.encode()).digest() for text in (salt, adapter))).digest()
