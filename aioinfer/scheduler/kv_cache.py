"""The scheduler's KV cache: for each group of layers a pool of blocks, and for each request a block
table in each group.

Layers that keep the same form a group (see `ipc/kv_spec.py`). Entry i of a block table is the block
of tokens [i * block_size, (i + 1) * block_size), so the tables of a request are equally long. The
tables differ in which entries are needed: where all tokens before it are attended to, all of them;
behind a sliding window, none, and such blocks go back to their pool while the request runs
(`NULL_BLOCK` takes their place). (The idea comes from vLLM's hybrid KV cache manager; here a group
has blocks of its own, and their number is fixed at the start.)

Which blocks can be freed behind a window. A step that computes tokens from position s on reads keys
from s - window + 1 on, and so do all steps that are planned after it. Steps that were posted before
may read earlier keys, but workers execute plans in order, so that the next owner of a freed block
writes to it only after these steps have read it. Hence `free_behind_windows` is called while a step
is planned, with the first position that it or a later one computes, and never with a position
behind it: the tokens of one step are written together, before any of them is read.

Prefix caching. The blocks of all groups carry the same hashes. A hit of h blocks needs, where all
tokens are attended to, all of them, and with a window only the last ones, which hold the
`window - 1` tokens before the hit's end. The hit is the longest that every group can serve.

Behind the hit, a cached block that begins with the next tokens of the prompt is copied
(`partial_blocks`). Workers copy before a step computes anything: the block must have been computed
by an earlier step, and its next owner may be in the same step.

Only the scheduler calls methods that change anything. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import MAX_ATTENTION_TILE, NULL_BLOCK, KVGroup
from aioinfer.scheduler.block_pool import MIN_COPIED_TOKENS, BlockPool, PartialBlocks, extend_hashes
from aioinfer.scheduler.request import Request


@dataclass(slots=True)
class Prefix:
    """A prefix hit: the blocks with which a request can begin, since other requests computed them.

    Attributes:
        num_tokens: tokens that need not be computed.
        num_blocks: entries of each block table that share their blocks.
        blocks: these entries, one list a group.
        copied: (group, block) of the blocks that hold the tokens after these entries, to be copied.
    """

    num_tokens: int
    num_blocks: int
    blocks: list[list[int]]
    copied: list[tuple[int, int]]


class KVCacheManager:
    """Allocates, shares and frees the blocks of requests.

    Attributes:
        groups: the groups of layers.
        pools: the pool of each group.
        prefix_caching: whether blocks of finished requests are found again.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        max_chunk: int,
        prefix_caching: bool = True,
    ):
        """Makes pools with all blocks free.

        Args:
            groups: of the model's layers.
            num_blocks: of each group.
            block_size: tokens a block.
            max_chunk: the maximum of a request's tokens that one step computes.
            prefix_caching: whether to keep blocks for prompts that begin alike.
        """
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(count) for _, count in zip(groups, num_blocks, strict=True))
        self._block_size = block_size
        self._max_chunk = max_chunk
        self._blocks_per_tile = max(1, MAX_ATTENTION_TILE // block_size)
        # requests that have lost blocks behind a window since the last plan, or begin without them
        self._moved: dict[Request, None] = {}
        self._windows = [(i, group.window) for i, group in enumerate(groups) if group.window]
        self.prefix_caching = prefix_caching
        # the blocks that can be copied; parent and tokens, by hash, of the blocks that the step
        # being planned may compute, which cannot be copied before the next step
        self._partial: PartialBlocks | None = None
        self._computing: dict[bytes, tuple[bytes, bytes]] = {}
        if self.prefix_caching and block_size > MIN_COPIED_TOKENS:
            self._partial = self.leading_pool.partial = PartialBlocks()

    # ---------------------------------------------------------------- what there is

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def leading_pool(self) -> BlockPool:
        """The pool that stands for all in reports about this cache: the pool of the first group
        that attends to all tokens, or else of the first group."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                return pool
        return self.pools[0]

    @property
    def num_free(self) -> int:
        """Blocks of all groups that have no owner, cached ones included."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_free_cached(self) -> int:
        """Blocks of all groups that have no owner and can be found by hash."""
        return sum(pool.num_free_cached for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Blocks of all groups that can be found by hash, owned or not."""
        return sum(pool.num_cached for pool in self.pools)

    @property
    def usage(self) -> float:
        """The fraction of blocks that have an owner, in the group where it is highest: the group
        that runs out of blocks first."""
        return max(pool.usage for pool in self.pools)

    @property
    def has_windows(self) -> bool:
        """Whether any blocks can be freed while their request runs."""
        return bool(self._windows)

    @property
    def max_replacement_blocks(self) -> int:
        """The maximum of entries that `take_replacement_blocks` yields for a request."""
        return len(self._windows) * (self._blocks_per_tile - 1)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens could run if it were alone."""
        return all(
            group.max_blocks(num_tokens, self._block_size, self._max_chunk) <= pool.num_blocks
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether the free blocks hold `num_tokens` tokens."""
        return all(
            group.max_blocks(num_tokens, self._block_size, self._max_chunk) <= pool.num_free
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def can_grow(self, count: int) -> bool:
        """Whether a request's block tables can get `count` more blocks."""
        return all(pool.num_free >= count for pool in self.pools)

    def fits_forks(self, prompt_len: int, num_tokens: int, count: int) -> bool:
        """Whether `count` sequences of one prompt, each of `num_tokens` tokens, could run if they
        were alone. They share the full blocks of the prompt, unless some of these may be gone
        behind a window."""
        shared = 0 if self._windows else prompt_len // self._block_size
        peaks = self._peaks(num_tokens)
        return all(
            peak + (count - 1) * (peak - shared) <= pool.num_blocks
            for pool, peak in zip(self.pools, peaks, strict=True)
        )

    def can_admit(self, prefix: Prefix, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens that begins with `prefix` finds its blocks free.

        All of its tokens count, even if the first step computes few of them. The blocks that it
        takes off a free list are the most that it owns at once, or, if that is less, the free
        blocks that it shares and the blocks that it allocates.
        """
        return all(
            taken <= pool.num_free
            for pool, taken in zip(self.pools, self._taken(prefix, num_tokens), strict=True)
        )

    def _peaks(self, num_tokens: int) -> list[int]:
        """Returns the most blocks of each group that a request owns at once."""
        size, chunk = self._block_size, self._max_chunk
        return [group.max_blocks(num_tokens, size, chunk) for group in self.groups]

    def _taken(self, prefix: Prefix, num_tokens: int) -> list[int]:
        """Returns how many free blocks of each group a request that begins with `prefix` takes."""
        fresh = -(-num_tokens // self._block_size) - prefix.num_blocks
        return [
            min(peak, fresh + pool.count_free(_owned(shared)))
            for peak, pool, shared in zip(
                self._peaks(num_tokens), self.pools, prefix.blocks, strict=True
            )
        ]

    # ---------------------------------------------------------------- the blocks of a request

    def admit(self, request: Request, prefix: Prefix, num_tokens: int) -> None:
        """Gives a request its block tables: the blocks of `prefix`, and new ones up to `num_tokens`
        tokens. The caller has checked `can_admit`."""
        for pool, shared in zip(self.pools, prefix.blocks, strict=True):
            pool.share(_owned(shared))
        request.blocks = [list(shared) for shared in prefix.blocks]
        request.num_blocks = prefix.num_blocks
        request.num_committed = prefix.num_blocks if self.prefix_caching else 0
        self.grow(request, -(-num_tokens // self._block_size) - prefix.num_blocks)
        if self._windows:
            self._moved[request] = None

    def grow(self, request: Request, count: int) -> None:
        """Appends `count` new blocks to each block table. The caller has checked `can_grow`."""
        for pool, table in zip(self.pools, request.blocks, strict=True):
            table += pool.allocate(count)
        request.num_blocks += count

    def free_behind_windows(self, request: Request, start: int) -> None:
        """Frees the blocks that are not read by any step which computes tokens of the request from
        position `start` on. See the module's docstring for when this is safe.

        Where a table grows by one token a step, it suffices to check when it needs a new block: a
        block ends up behind the window at most once in `block_size` steps.
        """
        for group, window in self._windows:
            table = request.blocks[group]
            first = end = max(0, start - window + 1) // self._block_size
            while first and table[first - 1] != NULL_BLOCK:
                first -= 1
            if first < end:
                self.pools[group].release(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)
                self._moved[request] = None

    def take_replacement_blocks(self) -> Iterator[tuple[Request, int, int, int]]:
        """Yields (request, group, index, block) of the replacement blocks: the table entries before
        the first block that a request owns behind a window, as far as attention may read them.
        Called once a plan, for the requests in which these entries changed.

        Kernels read whole tiles and mask the tokens behind the window. Yet a key or value that is
        NaN spoils the result even if it is masked; so the keys and values that they read there have
        to be the request's own, not the ones of the next owner of a freed block.
        """
        moved, self._moved = self._moved, {}
        if not self.max_replacement_blocks:
            return  # a tile reads one block, which is owned
        for request in moved:
            for group, _ in self._windows if request.blocks else ():
                table = request.blocks[group]
                owned = bisect_left(table, True, key=_is_block)
                if owned == len(table):  # it gets a block before it is planned again
                    self._moved[request] = None
                    continue
                for index in range(owned - owned % self._blocks_per_tile, owned):
                    yield request, group, index, table[owned]

    def free(self, request: Request) -> None:
        """Takes a request's block tables away; blocks without another owner become free."""
        for pool, table in zip(self.pools, request.blocks, strict=True):
            pool.release(_owned(table))
        request.blocks = []
        request.num_blocks = request.num_committed = 0

    # ---------------------------------------------------------------- prefixes

    def fork(self, leader: Request, num_tokens: int) -> Prefix | None:
        """Returns a prefix of the leader's first `num_tokens` tokens, which are computed: full
        blocks are shared, the block of the tokens after these is copied.

        None if the leader has freed blocks that are needed.
        """
        full = num_tokens // self._block_size
        prefix = Prefix(num_tokens, full, [table[:full] for table in leader.blocks], [])
        for group, window in self._windows:
            first = max(0, num_tokens - window + 1) // self._block_size
            shared = prefix.blocks[group]
            shared[:first] = [NULL_BLOCK] * len(shared[:first])
            if NULL_BLOCK in leader.blocks[group][first : full + 1]:
                return None
        if num_tokens % self._block_size:
            prefix.copied = [(group, table[full]) for group, table in enumerate(leader.blocks)]
        return prefix

    def replace(self, request: Request, prefix: Prefix) -> int:
        """Puts the blocks of `prefix`, which another request owns, in the place of a request's own.
        Copied blocks get their targets when the tables grow.

        Returns the first index at which the tables differ from before.
        """
        old, request.blocks = request.blocks, [list(shared) for shared in prefix.blocks]
        for pool, shared in zip(self.pools, request.blocks, strict=True):
            pool.share(_owned(shared))
        for pool, table in zip(self.pools, old, strict=bool(old)):
            pool.release(_owned(table))
        request.num_blocks, request.num_committed = prefix.num_blocks, 0
        request.num_computed = prefix.num_tokens
        if self._windows:
            self._moved[request] = None
        equal = (_count_equal(*pair) for pair in zip(old, request.blocks, strict=bool(old)))
        return min(equal, default=0)

    def no_prefix(self) -> Prefix:
        """Returns the prefix of a request that computes all of its tokens."""
        return Prefix(0, 0, [[] for _ in self.groups], [])

    def find_prefix(self, request: Request) -> Prefix:
        """Returns the longest prefix of a request's known tokens that all groups have cached.

        It leaves at least one token to compute, since that token's logits are needed, and all
        tokens whose rows a feature needs.
        """
        if not self.prefix_caching:
            return self.no_prefix()
        hashes = request.block_hashes
        extend_hashes(hashes, request.tokens, self._block_size, request.hash_root)
        longest = request.total - 1
        for use in request.uses:
            if use.max_cached is not None:
                longest = min(longest, use.max_cached)
        length = self._hit_length(hashes[: longest // self._block_size])
        blocks = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            first = 0 if group.window is None else max(0, length - self._reach(group.window))
            blocks.append([NULL_BLOCK] * first + pool.lookup(hashes[first:length]))
        copied, num_copied = self._find_partial(request, length, longest)
        return Prefix(length * self._block_size + num_copied, length, blocks, copied)

    def _find_partial(
        self, request: Request, length: int, longest: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Returns a cached block of each group that begins with the tokens of a request behind its
        first `length` blocks, and how many of its tokens are equal, up to token `longest` of the
        request; no blocks and 0 if there is none that every group has."""
        start = length * self._block_size
        room = min(longest - start, self._block_size)
        if self._partial is None or room < MIN_COPIED_TOKENS:
            return [], 0
        parent = request.block_hashes[length - 1] if length else request.hash_root
        found, count = self._partial.find(parent, request.tokens[start : start + room].tobytes())
        if not found or found in self._computing:  # one group may have it, and another compute it
            return [], 0
        if not all(pool.has(found) for pool in self.pools):
            return [], 0
        blocks = (pool.lookup([found])[0] for pool in self.pools)
        return list(enumerate(blocks)), count

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of a prompt's blocks, from its start on, need not be computed."""
        return self._hit_length(hashes) if self.prefix_caching else 0

    def _hit_length(self, hashes: Sequence[bytes]) -> int:
        """Returns the greatest number of leading blocks that every group can serve.

        Each group shortens the hit to the longest that it can serve. With a window that may be at
        any earlier place, so the others are searched again until all agree.
        """
        length = len(hashes)
        for spec, pool in zip(self.groups, self.pools, strict=True):
            if spec.window is None:
                length = min(length, pool.count_cached(hashes))
        agreed = 0
        while agreed < len(self._windows):
            for group, window in self._windows:
                pool = self.pools[group]
                found = pool.count_cached_before(hashes, length, self._reach(window))
                agreed = agreed + 1 if found == length else 1
                length = found
        return length

    def _reach(self, window: int) -> int:
        """Returns how many blocks before a block's first token that token reads."""
        return -(-(window - 1) // self._block_size)

    def commit(self, request: Request) -> None:
        """Enters a request's full blocks of known tokens into the prefix index."""
        if not self.prefix_caching:
            return
        full = min(request.num_computed, len(request.tokens)) // self._block_size
        first = request.num_committed
        if full <= first:
            return
        hashes = request.block_hashes
        if len(hashes) < full:
            extend_hashes(hashes, request.tokens, self._block_size, request.hash_root)
        for pool, table in zip(self.pools, request.blocks, strict=True):
            for index in range(first, full):
                if table[index] != NULL_BLOCK:
                    pool.commit(table[index], hashes[index])
        request.num_committed = full
        if self._partial is not None:
            self._note_tokens(request, first, full)

    def _note_tokens(self, request: Request, first: int, end: int) -> None:
        """Notes the tokens of the blocks `first` to `end` of a request, which are in the prefix
        index, for `publish_tokens`."""
        hashes, size = request.block_hashes, self._block_size
        for index in range(first, end):
            parent = hashes[index - 1] if index else request.hash_root
            tokens = request.tokens[index * size : (index + 1) * size].tobytes()
            self._computing[hashes[index]] = parent, tokens

    def publish_tokens(self) -> None:
        """Lets requests begin with copies of the blocks that the steps planned by now compute. To
        be called before a step is planned: a step's copies are made before it computes anything."""
        if self._partial is not None:
            pool = self.leading_pool
            for block_hash, (parent, tokens) in self._computing.items():
                if pool.has(block_hash):
                    self._partial.add(block_hash, parent, tokens)
            self._computing.clear()

    def forget(self, request: Request) -> None:
        """Takes a request's blocks out of the prefix index: their contents cannot be trusted."""
        for pool in self.pools:
            pool.forget(request.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix index."""
        for pool in self.pools:
            pool.forget_all()

    # ---------------------------------------------------------------- checks

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises IntegrityError unless the block tables of the running requests are complete and
        they are the only owners."""
        running = list(running)
        for request in running:
            self._check_tables(request)
        for number, pool in enumerate(self.pools):
            pool.check_integrity(_owned(request.blocks[number]) for request in running)

    def _check_tables(self, request: Request) -> None:
        name = request.request_id
        for group, table in zip(self.groups, request.blocks, strict=True):
            if len(table) != request.num_blocks:
                raise IntegrityError(
                    f"request {name} has {len(table)} blocks, not {request.num_blocks}"
                )
            freed = 0
            if group.window is not None:
                freed = max(0, request.num_computed - group.window + 1) // self._block_size
            if NULL_BLOCK in table[freed:]:
                raise IntegrityError(f"request {name} lacks a block that it reads")


def _count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common start of two block tables."""
    count = min(len(first), len(second))
    if first[:count] == second[:count]:
        return count
    return next(index for index in range(count) if first[index] != second[index])


def _is_block(entry: int) -> bool:
    return entry != NULL_BLOCK


def _owned(table: Sequence[int]) -> Sequence[int]:
    """Returns the blocks of a table; entries without one stand at its start."""
    if not table or table[0] != NULL_BLOCK:
        return table
    return [block for block in table if block != NULL_BLOCK]
