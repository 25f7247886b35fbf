"""The pool of KV blocks: the owners of each block, the free blocks, and the index of cached
prefixes.

`KVCacheManager` is its only caller and has a pool for each group of layers. A block is in one of
three states: owned (one reference for each block table that names it), free and cached (no owner,
but its contents are known by hash and can be shared again), or free and empty. Free blocks wait in
the order in which they are reused: empty ones first, then the least recently used cached ones. All
operations are O(1) a block.

Cached blocks are found by the hashes of whole blocks, and by the first tokens of a block. A hash
chains its parent's hash and the block's own tokens. Equal hashes mean equal tokens from the very
start of the sequence, so a block's keys and values can be reused (the scheme of vLLM's automatic
prefix caching). BLAKE2b with 128 bits: a prompt that lands on another user's blocks cannot be
crafted, as it could be with Python's own `hash`.

Where a prompt differs from the cached tokens in the middle of a block, the block's keys and values
before that place are right as well: a copy of the block spares computing them (`PartialBlocks`).
Which blocks come into question is known by their parent: blocks behind the same hash are compared
with the prompt token by token. (SGLang's radix tree shares any number of tokens, with blocks of one
token; here blocks are large, as kernels want them, so that tokens are copied instead.)
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple

from aioinfer.errors import IntegrityError
from aioinfer.scheduler.retention import Retention
from aioinfer.scheduler.stored_blocks import StoredBlocks


class BlockPool:
    """Reference counts, an LRU free list and the prefix index of `num_blocks` KV blocks.

    Attributes:
        changed: collects the hashes that enter or leave the prefix index, once a caller has put a
            set there.
        partial: loses the hashes that leave the prefix index, once a caller has put it there.
        stored: the group's part of the store of KV, which notes the blocks that get a hash and the
            hashes that leave the prefix index; None without a store.
        retention: which blocks are evicted last.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict(
            (block, None) for block in range(num_blocks)
        )
        self._num_free_cached = 0
        self.changed: set[bytes] | None = None
        self.partial: PartialBlocks | None = None
        self.stored: StoredBlocks | None = None
        self.retention = Retention(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could return, cached ones included."""
        return len(self._free)

    @property
    def num_free_cached(self) -> int:
        """Free blocks that can be found by hash."""
        return self._num_free_cached

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash, owned or not."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """The fraction of blocks that have an owner."""
        return 1.0 - len(self._free) / max(1, self.num_blocks)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks off the free list and out of the prefix index.

        The caller has checked `num_free`.
        """
        blocks = []
        for _ in range(count):
            block = self._take_free()
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _take_free(self) -> int:
        """Takes the block that is reused next off the free list. Retained ones go to its end, so
        that each is passed once while the list goes round."""
        for _ in range(len(self._free) if self.retention else 0):
            block, _ = self._free.popitem(last=False)
            if self._hash_of[block] not in self.retention:
                return block
            self._free[block] = None
        return self._free.popitem(last=False)[0]

    def retain(self, hashes: Iterable[bytes], seconds: float) -> None:
        """Has the blocks of a prefix evicted last for so long, as far as they are cached."""
        self.retention.keep([each for each in hashes if each in self._cached], seconds)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to each block; free ones leave the free list."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
                self._num_free_cached -= self._hash_of[block] is not None
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes an owner from each block.

        The last blocks become free first, so that the head of a prefix, which more prompts share,
        lives longest.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self._num_free_cached += 1

    def commit(self, block: int, block_hash: bytes) -> None:
        """Makes a full block known by its hash.

        A hash that another block carries already stays with that one.
        """
        if block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hash_of[block] = block_hash
            self._offer(block)
            if self.changed is not None:
                self.changed.add(block_hash)

    def _offer(self, block: int) -> None:
        """Has a block that has become known saved in the store."""
        block_hash = self._hash_of[block]
        if self.stored is not None and block_hash is not None:
            self.stored.note(block_hash, block)

    def has(self, block_hash: bytes) -> bool:
        """Whether a block carries a hash."""
        return block_hash in self._cached

    def hashes(self) -> list[bytes]:
        """Returns the hashes that blocks carry."""
        return list(self._cached)

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block that carries a hash, or None."""
        return self._cached.get(block_hash)

    @property
    def index(self) -> Mapping[bytes, int]:
        """The prefix index: the blocks by their hashes."""
        return self._cached

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks that carry `hashes`. The caller knows that all of them are cached."""
        return [self._cached[block_hash] for block_hash in hashes]

    def count_cached(self, hashes: Iterable[bytes], stored: Container[bytes] = ()) -> int:
        """Returns the length of the longest run of blocks from the start of `hashes` that are
        cached here or in `stored`."""
        cached = self._cached
        count = 0
        for block_hash in hashes:
            if block_hash not in cached and block_hash not in stored:
                break
            count += 1
        return count

    def count_cached_before(
        self, hashes: Sequence[bytes], end: int, run: int, stored: Container[bytes] = ()
    ) -> int:
        """Returns the greatest length, at most `end`, at which the last `run` of that many hashes
        (all of them, if there are fewer) are cached here or in `stored`."""
        cached = self._cached
        length = end
        for index in range(end - 1, -1, -1):
            if length - index > run:
                break
            if hashes[index] not in cached and hashes[index] not in stored:
                length = index
        return length

    def count_free(self, blocks: Iterable[int]) -> int:
        """Returns how many of `blocks` have no owner."""
        return sum(self._references[block] == 0 for block in blocks)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Takes the blocks that carry `hashes` out of the prefix index: their contents cannot be
        trusted."""
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is not None:
                self._forget(block)

    def forget_all(self) -> None:
        """Empties the prefix index."""
        for block in list(self._cached.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hash_of[block] = None
            self._num_free_cached -= self._references[block] == 0
            if self.changed is not None:
                self.changed.add(block_hash)
            if self.partial is not None:
                self.partial.remove(block_hash)
            if self.stored is not None:
                self.stored.lose(block_hash)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless each block has one reference for each of `tables` that names
        it, and the free list and the prefix index agree with that.

        Works on whole lists, since it runs in production: some 50 ns a block.
        """
        owners = Counter(chain.from_iterable(tables))
        expected = [0] * self.num_blocks
        for block, count in owners.items():
            expected[block] = count
        if expected != self._references:
            block = next(b for b in range(self.num_blocks) if expected[b] != self._references[b])
            raise IntegrityError(
                f"block {block}: {self._references[block]} references, {expected[block]} owners"
            )
        if any(map(expected.__getitem__, self._free)) or len(self._free) != expected.count(0):
            raise IntegrityError("the free list does not hold the blocks without an owner")
        if list(map(self._hash_of.__getitem__, self._cached.values())) != list(self._cached):
            raise IntegrityError("a block is cached under a hash that it does not carry")
        if self.num_blocks - self._hash_of.count(None) != len(self._cached):
            raise IntegrityError("a block carries a hash that the index lacks")
        free_hashes = list(map(self._hash_of.__getitem__, self._free))
        if len(free_hashes) - free_hashes.count(None) != self._num_free_cached:
            raise IntegrityError("free blocks that can be found by hash are miscounted")


HASH_BYTES = 16


def root_hash(extra: bytes = b"") -> bytes:
    """Returns the parent of a sequence's first block.

    `extra` keeps sequences apart that may not share blocks (a tenant's salt, a `Variant`).
    """
    return blake2b(extra, digest_size=HASH_BYTES, person=b"aioinfer").digest()


class KeyedSpan(NamedTuple):
    """Tokens whose keys and values depend on more than the tokens: those of a picture.

    Attributes:
        start, end: the first token, and the one behind the last.
        key: what they depend on.
    """

    start: int
    end: int
    key: bytes


def extend_hashes(
    hashes: list[bytes],
    tokens: array[int],
    block_size: int,
    root: bytes,
    spans: Sequence[KeyedSpan] = (),
) -> None:
    """Appends to `hashes` the missing hashes of the full blocks of `tokens` (int32); the hash of a
    block that has tokens of `spans` (ascending) contains their keys.

    About 0.7 us a block.
    """
    start = len(hashes)
    parent = hashes[-1] if hashes else root
    for first in range(start * block_size, len(tokens) - block_size + 1, block_size):
        block = tokens[first : first + block_size].tobytes()
        for span in touched(spans, first, first + block_size):
            block += span.key
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def touched(spans: Sequence[KeyedSpan], start: int, end: int) -> list[KeyedSpan]:
    """Returns the spans with tokens from `start` to `end`."""
    return [span for span in spans if span.start < end and start < span.end]


#: Fewer tokens are computed: under a chat template most prompts begin with a few equal ones, and a
#: whole block would be copied for these.
MIN_COPIED_TOKENS = 16
#: So many blocks behind the same parent are compared, the latest first.
_MAX_COMPARED = 8
_TOKEN_BYTES = 4


class PartialBlocks:
    """The tokens of cached blocks, by the hash of the block before each.

    The tokens of a block are one number, the first of them its lowest digits: two of them are
    compared at once, in 0.7 us for 128 tokens.
    """

    def __init__(self) -> None:
        self._tokens: dict[bytes, dict[bytes, int]] = {}  # parent -> hash -> tokens
        self._parents: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, block_hash: bytes, parent: bytes, tokens: bytes) -> None:
        """Enters a block.

        Args:
            block_hash: of the block.
            parent: the hash of the block before it, or the root of its sequence.
            tokens: the block's own, as int32.
        """
        if block_hash not in self._parents:
            self._parents[block_hash] = parent
            self._tokens.setdefault(parent, {})[block_hash] = _as_number(tokens)

    def remove(self, block_hash: bytes) -> None:
        """Removes a block, if it is there."""
        parent = self._parents.pop(block_hash, None)
        if parent is not None:
            siblings = self._tokens[parent]
            del siblings[block_hash]
            if not siblings:
                del self._tokens[parent]

    def find(self, parent: bytes, tokens: bytes) -> tuple[bytes, int]:
        """Returns the hash of the block behind `parent` that has most of `tokens` (int32) at its
        start, and how many; no hash and 0 if they are fewer than `MIN_COPIED_TOKENS`."""
        siblings, room = self._tokens.get(parent), len(tokens) // _TOKEN_BYTES
        if siblings is None:
            return b"", 0
        best, longest, wanted = b"", 0, _as_number(tokens)
        for block_hash, cached in islice(reversed(siblings.items()), _MAX_COMPARED):
            count = _count_common(cached, wanted, room)
            if count > longest:
                best, longest = block_hash, count
        return (best, longest) if longest >= MIN_COPIED_TOKENS else (b"", 0)


def _as_number(tokens: bytes) -> int:
    return int.from_bytes(tokens, "little")


def _count_common(first: int, second: int, limit: int) -> int:
    """Returns how many tokens two sequences have in common at their start, at most `limit`."""
    differing = first ^ second
    if not differing:
        return limit
    lowest_bit = (differing & -differing).bit_length() - 1
    return min(limit, lowest_bit // (8 * _TOKEN_BYTES))
