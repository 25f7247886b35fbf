"""The scheduler's KV cache: for each group of layers a pool of blocks, and for each request a block
table in each group.

Layers that keep the same form a group (see `ipc/kv_spec.py`). Entry i of a block table is the block
of tokens [i * block_size, (i + 1) * block_size), so the tables of a request are equally long. The
tables differ in which entries are needed: where all tokens before it are attended to, all of them;
behind a sliding window, none; of a state, the one of the last computed token. Blocks that are not
needed any more go back to their pool while the request runs (`NULL_BLOCK` takes their place). (The
idea comes from vLLM's hybrid KV cache manager; here a group has blocks of its own, and their number
is fixed at the start.) An object for each kind of groups knows what they need (`group_blocks.py`,
`snapshots.py`).

When blocks can be freed. Steps that were posted before may read blocks that no step reads from now
on, but workers execute plans in order, so that the next owner of a freed block writes to it only
after these steps have read it. Hence `free_unread` is called while a step is planned, with the
first position that it or a later one computes, and never with a position behind it: the tokens of
one step are written together, before any of them is read.

`PrefixSearch` finds cached blocks that begin like a request. Behind the pools there may be a store
with further blocks (`kv_store`), found by the same hashes, which `PrefixLoads` bring.

Only the scheduler calls methods that change anything. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import NULL_BLOCK, KVGroup
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.group_blocks import WholeBlocks, WindowBlocks
from aioinfer.scheduler.kv_store import KVStore
from aioinfer.scheduler.prefix_loads import PrefixLoads
from aioinfer.scheduler.prefix_search import Prefix, PrefixSearch
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.snapshots import SnapshotPool, StateBlocks
from aioinfer.scheduler.source_blocks import SourceBlocks


class KVCacheManager:
    """Allocates, shares and frees the blocks of requests.

    Attributes:
        groups: the groups of layers.
        pools: the pool of each group.
        prefix_caching: whether blocks of finished requests are found again.
        prefixes: finds prefix hits.
        store: has blocks beyond those of the pools; None without one.
        loads: bring prefixes that the store has; None without one.
        sources: the blocks of sources; None in a model without them.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        max_chunk: int,
        prefix_caching: bool = True,
        store: KVStore | None = None,
    ):
        """Makes pools with all blocks free.

        Args:
            groups: of the model's layers.
            num_blocks: of each group.
            block_size: tokens a block.
            max_chunk: the maximum of a request's tokens that one step computes.
            prefix_caching: whether to keep blocks for prompts that begin alike.
            store: has further blocks, if there is one.
        """
        self.groups = tuple(groups)
        self.pools = tuple(
            (SnapshotPool if group.keeps_states else BlockPool)(count)
            for group, count in zip(groups, num_blocks, strict=True)
        )
        self._block_size = block_size
        self._max_chunk = max_chunk
        self.prefix_caching = prefix_caching and bool(groups)
        self._era = 0  # see `Request.cache_era`
        self.store = store if self.prefix_caching else None
        for pool, stored in zip(self.pools, self.store.groups if self.store else (), strict=False):
            pool.stored = stored
        numbered = list(zip(range(len(groups)), groups, self.pools, strict=True))
        whole = [group for group in numbered if group[1].window is None]
        states = [group for group in numbered if group[1].keeps_states]
        sources = [group for group in numbered if group[1].keeps_source]
        windows = [group for group in numbered if group not in [*whole, *states, *sources]]
        self._windows = WindowBlocks(windows, block_size) if windows else None
        self._states: StateBlocks | None = None
        if states:
            self._states = StateBlocks(states, block_size, prefix_caching=prefix_caching)
        self.sources: SourceBlocks | None = None
        if sources:
            self.sources = SourceBlocks(sources, block_size, is_shared=prefix_caching)
        of_tokens = WholeBlocks(whole, block_size) if whole else None
        kinds = (of_tokens, self._windows, self._states, self.sources)
        self._kinds: list[WholeBlocks] = [kind for kind in kinds if kind is not None]
        self.prefixes = PrefixSearch(
            self.pools, self._kinds, self._states, self.leading_pool, block_size,
            prefix_caching=self.prefix_caching,
        )  # fmt: skip
        self.loads: PrefixLoads | None = None
        if self.store is not None:
            self.loads = PrefixLoads(
                self.store, self.pools, self._kinds, self.prefixes, block_size, self._peaks,
                self.free,
            )  # fmt: skip

    # ---------------------------------------------------------------- what there is

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def leading_pool(self) -> BlockPool:
        """The pool that stands for all in reports about this cache: the pool of the first group
        that attends to all tokens, or else of the first group; without groups an empty one."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                return pool
        return self.pools[0] if self.pools else BlockPool(0)

    @property
    def found_pool(self) -> BlockPool:
        """The pool whose hashes tell where a request can begin: of states where there are any (the
        same hashes in each), since a hit ends at a snapshot."""
        of_states = (pool for pool in self.pools if isinstance(pool, SnapshotPool))
        return next(of_states, self.leading_pool)

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
        return max((pool.usage for pool in self.pools), default=0.0)

    @property
    def frees_early(self) -> bool:
        """Whether any blocks can be freed while their request runs."""
        return self._windows is not None or self._states is not None

    @property
    def forks_anywhere(self) -> bool:
        """Whether a fork may begin behind any number of its leader's tokens, and not only where the
        leader has a state."""
        return self._states is None

    @property
    def finds_states(self) -> bool:
        """Whether a request may begin with the state of another one."""
        return self._states is not None and self.prefix_caching

    @property
    def max_replacement_blocks(self) -> int:
        """The maximum of entries that `take_replacement_blocks` yields for a request."""
        return 0 if self._windows is None else self._windows.max_replacement_blocks

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

    def can_grow(self, request: Request, count: int) -> bool:
        """Whether the block tables of a request can get `count` more entries."""
        return all(kind.can_grow(request, count) for kind in self._kinds)

    def fits_forks(self, prompt_len: int, num_tokens: int, count: int) -> bool:
        """Whether `count` sequences of one prompt, each of `num_tokens` tokens, could run if they
        were alone. They share the full blocks of the prompt, unless some of these may be gone
        behind a window."""
        shared = 0 if self.frees_early else prompt_len // self._block_size
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

    def admit(
        self, request: Request, prefix: Prefix, num_tokens: int, waiting: Iterable[Request] = ()
    ) -> None:
        """Gives a request its block tables: the blocks of `prefix`, and new ones up to `num_tokens`
        tokens. The caller has checked `can_admit`. See `PrefixSearch.want_shared` for
        `waiting`."""
        self._begin(request, prefix)
        request.num_committed = prefix.num_blocks if self.prefix_caching else 0
        if self._states is not None:
            if self.prefix_caching:
                self.prefixes.extend_hashes(request)
            request.left = None
            request.snapshots = self._states.find_wanted(request, prefix.num_blocks)
            self.prefixes.want_shared(request, waiting)
        if self.store is not None:
            self.store.use(request.block_hashes[: prefix.num_blocks])
        self.grow(request, -(-num_tokens // self._block_size) - prefix.num_blocks)

    def _begin(self, request: Request, prefix: Prefix) -> None:
        """Gives a request the block tables of a prefix."""
        request.blocks = [list(shared) for shared in prefix.blocks]
        request.num_blocks = prefix.num_blocks
        request.cache_era = self._era if prefix.cache_era < 0 else prefix.cache_era
        for kind in self._kinds:
            kind.share(request)

    def grow(self, request: Request, count: int) -> None:
        """Appends `count` entries to each block table, with new blocks where they are needed. The
        caller has checked `can_grow`."""
        for kind in self._kinds:
            kind.grow(request, count)
        request.num_blocks += count

    def free_unread(self, request: Request, start: int) -> None:
        """Frees the blocks that are not read by any step which computes tokens of the request from
        position `start` on. See the module's docstring for when this is safe.

        Where a table grows by one token a step, it suffices to check when it needs a new block: a
        block ends up behind the window at most once in `block_size` steps.
        """
        if self._windows is not None:
            self._windows.free_unread(request, start)
        if self._states is not None:
            self._states.free_unread(request, start)

    def take_replacement_blocks(self) -> Iterator[tuple[Request, int, int, int]]:
        """Yields (request, group, index, block) of the replacement blocks: the table entries before
        the first block that a request owns behind a window, as far as attention may read them.
        Called once a plan, for the requests in which these entries changed.

        Kernels read whole tiles and mask the tokens behind the window. Yet a key or value that is
        NaN spoils the result even if it is masked; so the keys and values that they read there have
        to be the request's own, not the ones of the next owner of a freed block.
        """
        return iter(()) if self._windows is None else self._windows.take_replacement_blocks()

    def take_gaps(self) -> Iterator[tuple[Request, int, int]]:
        """Yields (request, group, index) of the table entries in the chunks of the step being
        planned where no state is kept: workers have to know that. Called once a plan."""
        return iter(()) if self._states is None else self._states.take_gaps()

    def free(self, request: Request) -> None:
        """Takes a request's block tables away; blocks without another owner become free."""
        if request.blocks:
            if self._states is not None:
                self._states.leave(request)
            if self._windows is not None:
                self._windows.leave(request)
            if self.store is not None:
                self.store.use(request.block_hashes[: request.num_committed])
            if request.retain_s:
                self._retain(request.block_hashes[: request.num_committed], request.retain_s)
            for kind in self._kinds:
                kind.free(request, request.blocks)
        request.blocks = []
        request.num_blocks = request.num_committed = 0

    def _retain(self, hashes: Sequence[bytes], seconds: float) -> None:
        """Has the blocks of a prefix evicted last for so long, here and in the store."""
        for pool in self.pools:
            pool.retain(hashes, seconds)
        if self.store is not None:
            self.store.retain(hashes, seconds)

    # ---------------------------------------------------------------- prefixes

    def fork(self, leader: Request, num_tokens: int) -> Prefix | None:
        """Returns a prefix of the leader's first `num_tokens` tokens, which are computed: full
        blocks are shared, the block of the tokens after these is copied.

        None if the leader has freed blocks that are needed.
        """
        full = num_tokens // self._block_size
        tables: list[list[int]] = [[] for _ in self.groups]
        for kind in self._kinds:
            for number, table in kind.forked_tables(leader, num_tokens):
                if table is None:
                    return None
                tables[number] = table
        prefix = Prefix(num_tokens, full, tables, [], leader.cache_era)
        if num_tokens % self._block_size:
            prefix.copied = [
                (number, leader.blocks[number][full])
                for kind in self._kinds
                for number, _ in kind.copied
            ]
        return prefix

    def replace(self, request: Request, prefix: Prefix) -> int:
        """Puts the blocks of `prefix`, which another request owns, in the place of a request's own.
        Copied blocks get their targets when the tables grow.

        Returns the first index at which the tables differ from before.
        """
        old = request.blocks
        self._begin(request, prefix)
        if old:
            for kind in self._kinds:
                kind.free(request, old)
        request.num_committed = 0
        request.num_computed = request.num_settled = prefix.num_tokens
        equal = (_count_equal(*pair) for pair in zip(old, request.blocks, strict=bool(old)))
        return min(equal, default=0)

    def commit(self, request: Request) -> None:
        """Enters a request's full blocks of known tokens into the prefix index, unless this has
        been emptied since the request began: its keys may then be of two kinds of weights."""
        if not self.prefix_caching or request.cache_era != self._era:
            return
        computed = request.num_computed - request.num_lookahead  # `min_computed`, without a call
        if self._states is not None:
            computed = min(computed, request.num_settled)
        full = min(computed, len(request.tokens)) // self._block_size
        first = request.num_committed
        if full <= first:
            return
        if len(request.block_hashes) < full:
            self.prefixes.extend_hashes(request)
        for kind in self._kinds:
            kind.commit(request, first, full)
        request.num_committed = full
        self.prefixes.note_tokens(request, first, full)

    def publish(self) -> None:
        """Lets requests begin with copies of the blocks, and with the states, that the steps
        planned by now compute. To be called before a step is planned: a step copies blocks and
        reads states before it computes any."""
        if self._states is not None:
            self._states.publish()
        if self.store is not None:
            self.store.publish()
        self.prefixes.publish()

    def forget(self, request: Request) -> None:
        """Takes a request's blocks out of the prefix index: their contents cannot be trusted."""
        for pool in self.pools:
            pool.forget(request.block_hashes)
        if self.sources is not None:
            self.sources.forget(request)
        if self.store is not None:
            self.store.drop(request.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix index, and the store. Requests that have blocks enter no more of
        them."""
        self._era += 1
        self.forget_device()
        if self.store is not None:
            self.store.clear()

    def forget_device(self) -> None:
        """Empties the prefix index; the store keeps its blocks."""
        for pool in self.pools:
            pool.forget_all()

    # ---------------------------------------------------------------- checks

    def check_integrity(self, running: Iterable[Request], loading: Iterable[Request] = ()) -> None:
        """Raises IntegrityError unless the block tables of the running requests, and of those whose
        blocks are loaded, are complete and they are the only owners."""
        loading = list(loading)
        running = [*running, *(request for request in loading if request.blocks)]
        if self.loads is not None:
            self.loads.check_integrity(loading)
        for request in running:
            for table in request.blocks:
                if len(table) != request.num_blocks:
                    raise IntegrityError(
                        f"request {request.request_id} has {len(table)} blocks, "
                        f"not {request.num_blocks}"
                    )
            for kind in self._kinds:
                kind.check_tables(request)
        for kind in self._kinds:
            kind.check_pools(running)


def _count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common start of two block tables."""
    count = min(len(first), len(second))
    if first[:count] == second[:count]:
        return count
    return next(index for index in range(count) if first[index] != second[index])


def _owned(table: Sequence[int]) -> Iterable[int]:
    """Returns the blocks of a table."""
    return (block for block in table if block != NULL_BLOCK)
