"""How KV blocks are found again: by the hashes of whole blocks, and by the first tokens of a block.

A hash chains its parent's hash and the block's own tokens. Equal hashes mean equal tokens from the
very start of the sequence, so a block's keys and values can be reused (the scheme of vLLM's
automatic prefix caching). BLAKE2b with 128 bits: a prompt that lands on another user's blocks
cannot be crafted, as it could be with Python's own `hash`.

Where a prompt differs from the cached tokens in the middle of a block, the block's keys and values
before that place are right as well: a copy of the block spares computing them (`PartialBlocks`).
Which blocks come into question is known by their parent: blocks behind the same hash are compared
with the prompt token by token. (SGLang's radix tree shares any number of tokens, with blocks of one
token; here blocks are large, as kernels want them, so that tokens are copied instead.)
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from itertools import islice

HASH_BYTES = 16


def root_hash(extra: bytes = b"") -> bytes:
    """Returns the parent of a sequence's first block.

    `extra` keeps sequences apart that may not share blocks (a tenant's salt, an adapter).
    """
    return blake2b(extra, digest_size=HASH_BYTES, person=b"aioinfer").digest()


def extend_hashes(hashes: list[bytes], tokens: array[int], block_size: int, root: bytes) -> None:
    """Appends to `hashes` the missing hashes of the full blocks of `tokens` (int32).

    About 0.7 us a block.
    """
    start = len(hashes)
    parent = hashes[-1] if hashes else root
    for first in range(start * block_size, len(tokens) - block_size + 1, block_size):
        parent = blake2b(
            parent + tokens[first : first + block_size].tobytes(), digest_size=HASH_BYTES
        ).digest()
        hashes.append(parent)


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
