"""The hashes by which KV blocks are found again: each chains its parent's hash and its own tokens.

Equal hashes mean equal tokens from the very start of the sequence, which is what makes a block's
keys and values reusable (the scheme of vLLM's automatic prefix caching). BLAKE2b with 128 bits:
nobody can craft a prompt that lands on another user's blocks, as would be possible with Python's
own `hash`.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(extra: bytes = b"") -> bytes:
    """Returns the parent of a sequence's first block.

    `extra` keeps apart what may not be shared (a tenant's salt, an adapter).
    """
    return blake2b(extra, digest_size=HASH_BYTES, person=b"aioinfer").digest()


def extend_hashes(hashes: list[bytes], tokens: array[int], block_size: int, root: bytes) -> None:
    """Appends to `hashes` those of the full blocks of `tokens` (int32) that it lacks.

    About 0.7 us a block.
    """
    start = len(hashes)
    parent = hashes[-1] if hashes else root
    for first in range(start * block_size, len(tokens) - block_size + 1, block_size):
        parent = blake2b(
            parent + tokens[first : first + block_size].tobytes(), digest_size=HASH_BYTES
        ).digest()
        hashes.append(parent)
