"""The blocks of groups of states: which of them a request has, which are kept as snapshots, and
which snapshot is evicted first.

A block holds a whole state, and entry i of a block table is the state at the end of block i's
tokens, or at the last computed token in the block that it lies in (see `ipc/kv_spec.py`). So a
request reads one entry, the one of the token before those that it computes, and has few blocks,
however long it is (`Request.states`): the last one, in a step that begins a block the one before
it, and in a step that computes a chunk of the prompt the snapshots that are wanted there. All
groups of states have blocks at the same entries, since a hit needs the states of all layers.

Only a state at exactly the end of a block's tokens enters the prefix index, where it is a snapshot.
It is found by the next plan at the earliest: a step that reads a state has to run behind the step
that writes it. (Keys may be shared in the step that computes them.)

Which snapshots are kept. A snapshot takes as many bytes as the keys of a thousand tokens and more,
so they are few. Wanted are the last block boundary of a prompt, and the places where it parts from
one that was seen before (`SeenPrefixes`) or that waits: behind a system prompt, a document, or a
conversation whose last answer was changed. A request also makes one at each boundary that its
output passes, without a copy, and the next one supersedes it. So when it ends, or is preempted, the
last one stays: the next turn of the conversation begins there. Every snapshot but the wanted ones
is forgotten when the request leaves the next one behind, unless another request wants it or has
ended with it. While no block is free, a request that begins a block writes over the state before
it, and keeps no snapshot.

Which snapshot is evicted. The one that saves least, by the rule of GreedyDual (Young 1994): a
snapshot's value is the number of tokens that it saves computing, behind the snapshot before it (see
`_find_former`), plus the highest value of a snapshot that had been evicted when it was used last.
So values age, and snapshots that save equally many tokens are evicted in the order of their last
use. A snapshot that one request alone has begun with goes first: that request makes later ones of
the same text. So does one of a prompt with which no request has begun by the time that the answer
has a snapshot: most conversations go on behind the answer, and where memory is scarce, a snapshot
of each prompt would take the place of another conversation's last one. Snapshots of a pool are
equally large, so that bytes need no place in the rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from aioinfer.errors import IntegrityError
from aioinfer.ipc.kv_spec import NULL_BLOCK
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.group_blocks import NumberedGroup, Stored, WholeBlocks
from aioinfer.scheduler.request import Request

#: A snapshot where two prompts part has to save computing so many blocks at least. Many prompts
#: share the first few tokens of a chat template, which are computed sooner than a state is kept.
MIN_SHARED_BLOCKS = 2
#: Hashes of blocks that are remembered to find out where prompts part: some 160 bytes each.
_MAX_SEEN = 32_768


class SnapshotPool(BlockPool):
    """A pool of states, in which a cached block without an owner is reused in the order of its
    value."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._saved = [0] * num_blocks  # tokens
        self._value = [0.0] * num_blocks
        self._shares = [0] * num_blocks  # how often a request has begun with the state
        self._stays = [False] * num_blocks  # whether a request has left it that wants it kept
        self._floor = 0.0
        self._most_saved = 1
        # (value, order of release, block) of free cached blocks; entries may be out of date
        self._heap: list[tuple[float, int, int]] = []
        self._num_released = 0

    def _take_free(self) -> int:
        """See `BlockPool._take_free`."""
        block = self._next()
        del self._free[block]
        return block

    def _next(self) -> int:
        """Returns the block to be reused next."""
        first = next(iter(self._free))
        if self._hash_of[first] is None:
            return first
        num_passed = 0
        while True:
            value, _, block = heappop(self._heap)
            if not self._is_current(value, block):
                continue
            if num_passed < len(self._free) and self._hash_of[block] in self.retention:
                num_passed += 1
                self._enter(block, value + self._most_saved)  # it comes after others
                continue
            self._floor = max(self._floor, value)
            return block

    def _is_current(self, value: float, block: int) -> bool:
        """Whether an entry of the heap is about a block as it is now."""
        return (
            block in self._free and self._hash_of[block] is not None and self._value[block] == value
        )

    def share(self, blocks: Iterable[int]) -> None:
        """See `BlockPool.share`."""
        shared = list(blocks)
        super().share(shared)
        for block in shared:
            self._shares[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.release`."""
        super().release(blocks)
        for block in blocks:
            if not self._references[block] and self._hash_of[block] is not None:
                self._enter(block, self._floor + self._saved[block])

    def demote(self, block: int, max_shares: int = 1) -> None:
        """Has a snapshot evicted before the others if at most `max_shares` requests have begun
        with it: the caller's request makes a later snapshot of the same text."""
        is_evictable = not self._references[block] and self._hash_of[block] is not None
        if is_evictable and self._shares[block] <= max_shares:
            self._enter(block, self._floor)

    def demote_unused(self, block_hash: bytes) -> None:
        """Has the snapshot with a hash, if there is one, evicted before the others if no request
        has begun with it."""
        if (block := self._cached.get(block_hash)) is not None:
            self.demote(block, 0)

    def _enter(self, block: int, value: float) -> None:
        """Enters a free cached block among the ones to be evicted."""
        self._num_released += 1
        self._value[block] = value
        heappush(self._heap, (value, self._num_released, block))
        if len(self._heap) > 2 * self.num_blocks:
            current = (e for e in sorted(self._heap) if self._is_current(e[0], e[2]))
            self._heap = list(
                {block: (value, order, block) for value, order, block in current}.values()
            )
            heapify(self._heap)

    def keep(self, block: int, block_hash: bytes, saved: int) -> None:
        """Makes a state known by the hash of its block, as `commit` does; a hit with it saves
        computing `saved` more tokens than the snapshot before it does."""
        self.commit(block, block_hash)
        self._saved[block], self._shares[block], self._stays[block] = saved, 0, False
        self._most_saved = max(self._most_saved, saved)

    def _offer(self, block: int) -> None:
        """See `BlockPool._offer`: not before it is clear that no later snapshot supersedes it."""

    def save(self, block_hash: bytes) -> None:
        """Has the snapshot with a hash, if there is one, saved in the store, and no longer dropped
        by a request that supersedes it: another request may have left it behind as well."""
        if (block := self._cached.get(block_hash)) is not None:
            self._stays[block] = True
            super()._offer(block)

    def drop(self, block_hash: bytes, block: int) -> None:
        """Takes a snapshot out of the prefix index, if it is still in this block, nothing uses it,
        and no request had it saved."""
        is_there = self._cached.get(block_hash) == block
        if is_there and not self._references[block] and not self._stays[block]:
            self._forget(block)

    def take_back(self, block: int) -> None:
        """Takes a block out of the prefix index, since its only owner writes another state to
        it."""
        self._forget(block)

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._references[block] > 1

    def _forget(self, block: int) -> None:
        super()._forget(block)
        if block in self._free:
            self._free.move_to_end(block, last=False)


class SeenPrefixes:
    """The hashes of blocks of prompts and outputs that were computed lately, kept in a block or
    not."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Sequence[bytes]) -> None:
        """Notes the hashes of blocks."""
        seen = self._hashes
        seen.update(dict.fromkeys(hashes))
        while len(seen) > _MAX_SEEN:
            seen.popitem(last=False)

    def count(self, hashes: Sequence[bytes], end: int, first: int) -> int:
        """Returns how many leading blocks, at most `end`, some sequence had in common with
        `hashes`; `first` if they are not more than that."""
        for length in range(end, first, -1):
            if hashes[length - 1] in self._hashes:
                return length
        return first


class StateBlocks(WholeBlocks):
    """Blocks of the groups of states."""

    def __init__(self, groups: Sequence[NumberedGroup], block_size: int, *, prefix_caching: bool):
        super().__init__(groups, block_size)
        self._states = [
            (number, pool) for number, pool in self._pools if isinstance(pool, SnapshotPool)
        ]
        self._prefix_caching = prefix_caching
        self._seen = SeenPrefixes()
        self._fresh: set[bytes] = set()  # of snapshots that the step being planned may write
        # (first entry, end) of entries without a block in the chunks of the plan
        self._gaps: dict[Request, list[tuple[int, int]]] = {}

    # ---------------------------------------------------------------- the blocks of a request

    def can_grow(self, request: Request, count: int) -> bool:
        """See `WholeBlocks.can_grow`: however many entries there are, the last one has a block, if
        need be the block of the entry before it."""
        return not count or self._has_free() or (count == 1 and self._can_move(request))

    def _has_free(self) -> bool:
        return all(pool.num_free for _, pool in self._pools)

    def _can_move(self, request: Request) -> bool:
        """Whether a request that begins a block may write its next state over the last one."""
        last = request.num_blocks - 1
        return (
            request.num_computed == request.num_blocks * self._block_size
            and not request.num_lookahead
            and request.states[-1:] == [last]
            and not any(pool.is_shared(request.blocks[n][last]) for n, pool in self._states)
        )

    def _move(self, request: Request) -> None:
        """Gives the last block of a request to its next entry. Workers know it by both: the step
        reads a state and writes the next one in its place."""
        last = request.states.pop()
        for number, pool in self._states:
            table = request.blocks[number]
            pool.take_back(table[last])
            table.append(table[last])
            table[last] = NULL_BLOCK
        request.states.append(last + 1)

    def grow(self, request: Request, count: int) -> None:
        """See `WholeBlocks.grow`. The last entry gets a block, and others where a snapshot is
        wanted and blocks are to spare."""
        if count <= 0:
            return
        if not self._has_free():
            self._move(request)
            return
        first, last = request.num_blocks, request.num_blocks + count - 1
        spare = min(pool.num_free for _, pool in self._pools) - 1
        wanted = [blocks - 1 for blocks in request.snapshots if first < blocks <= last]
        entries = [*wanted[max(0, len(wanted) - spare) :], last]
        for number, pool in self._pools:
            table = request.blocks[number]
            table += [NULL_BLOCK] * count
            for entry, block in zip(entries, pool.allocate(len(entries)), strict=True):
                table[entry] = block
        request.states += entries
        if len(entries) < count:
            self._gaps.setdefault(request, []).append((first, last))

    def take_gaps(self) -> Iterator[tuple[Request, int, int]]:
        """Yields (request, group, entry) of the entries without a block in the chunks of the step
        being planned, where a worker may have a block of the slot's former owner. Called once a
        plan."""
        gaps, self._gaps = self._gaps, {}
        for request, ranges in gaps.items():
            for first, end in ranges:
                for number, _ in self._pools:
                    table = request.blocks[number]
                    for entry in range(first, end):
                        if table[entry] == NULL_BLOCK:
                            yield request, number, entry

    def share(self, request: Request) -> None:
        """See `WholeBlocks.share`."""
        super().share(request)
        table = request.blocks[self._pools[0][0]]
        request.states = [index for index, block in enumerate(table) if block != NULL_BLOCK]

    def free(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """See `WholeBlocks.free`."""
        self._gaps.pop(request, None)
        for number, pool in self._pools:
            pool.release([block for block in tables[number] if block != NULL_BLOCK])

    def leave(self, request: Request) -> None:
        """Has the last snapshots of a request saved, which loses its blocks."""
        # a fork has fewer hashes by now than it had blocks
        known = request.block_hashes[: request.num_committed]
        hashes = [known[index] for index in request.states if index < len(known)]
        if request.left is not None:
            hashes.append(request.left[0])
        for _, pool in self._states:
            for block_hash in hashes:
                pool.save(block_hash)

    def free_unread(self, request: Request, start: int) -> None:
        """See `WholeBlocks.free_unread`. A step reads the entry of token `start - 1`, or of an
        earlier one if the inputs of lookahead rows are behind the state."""
        states = request.states
        count = bisect_left(states, (min(start, request.num_settled) - 1) // self._block_size)
        for index in states[:count]:
            if request.left is not None:
                for block, (_, pool) in zip(request.left[1], self._states, strict=True):
                    pool.drop(request.left[0], block)
            blocks = [request.blocks[number][index] for number, _ in self._states]
            request.left = None
            if index + 1 not in request.snapshots and index < request.num_committed:
                request.left = request.block_hashes[index], blocks
                self._demote_prompt(request)
            elif index < request.num_committed:
                for _, pool in self._states:
                    pool.save(request.block_hashes[index])
            for block, (number, pool) in zip(blocks, self._states, strict=True):
                pool.release([block])
                if [index + 1] == request.snapshots[:1]:
                    pool.demote(block)
                request.blocks[number][index] = NULL_BLOCK
        del states[:count]

    def _demote_prompt(self, request: Request) -> None:
        """Has the snapshots of a request's prompt that nothing else uses evicted first."""
        for end in request.snapshots[1:]:
            for _, pool in self._states:
                pool.demote_unused(request.block_hashes[end - 1])

    def forked_tables(
        self, leader: Request, num_tokens: int
    ) -> Iterator[tuple[int, list[int] | None]]:
        """See `WholeBlocks.forked_tables`. There is a state where the leader has computed
        `num_tokens` tokens, or has a snapshot of them."""
        full, rest = divmod(num_tokens, self._block_size)
        if rest:
            is_there = leader.num_computed == leader.num_settled == num_tokens
        else:
            is_there = not full or full - 1 in leader.states
        for number, _ in self._pools:
            table = [NULL_BLOCK] * full
            if full and not rest:
                table[-1] = leader.blocks[number][full - 1]
            yield number, table if is_there else None

    # ---------------------------------------------------------------- prefixes

    def count_served(self, hashes: Sequence[bytes], length: int, stored: Stored) -> int:
        """See `WholeBlocks.count_served`."""
        for count in range(length, 0, -1):
            block_hash = hashes[count - 1]
            if block_hash not in self._fresh and all(
                pool.has(block_hash) or block_hash in stored[number] for number, pool in self._pools
            ):
                return count
        return 0

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """See `WholeBlocks.needed`."""
        for number, _ in self._pools:
            yield number, length - 1

    def find_wanted(self, request: Request, num_blocks: int) -> list[int]:
        """Returns `num_blocks`, with how many cached blocks a request begins, and after how many
        blocks snapshots of it are wanted, ascending."""
        if not self._prefix_caching:
            return []
        end = (request.prompt_len - 1) // self._block_size
        wanted = {num_blocks, max(num_blocks, end)}
        first = num_blocks + MIN_SHARED_BLOCKS - 1
        parted = self._seen.count(request.block_hashes, end, first)
        if parted > first:
            wanted.add(parted)
        return sorted(wanted)

    def commit(self, request: Request, first: int, end: int) -> None:
        """See `WholeBlocks.commit`."""
        hashes = request.block_hashes
        self._seen.add(hashes[first:end])
        for index in request.states:
            if first <= index < end:
                saved = (index + 1 - self._find_former(request, index)) * self._block_size
                self._fresh.add(hashes[index])
                for number, pool in self._states:
                    pool.keep(request.blocks[number][index], hashes[index], saved)

    def commit_loaded(self, request: Request) -> None:
        """See `WholeBlocks.commit_loaded`."""
        last = request.num_blocks - 1
        for number, pool in self._states:
            saved = request.num_blocks * self._block_size
            pool.keep(request.blocks[number][last], request.block_hashes[last], saved)

    def _find_former(self, request: Request, index: int) -> int:
        """Returns behind how many blocks a request has the snapshot that the one of block `index`
        improves on. That is not the end of its prompt, where it began before that: a conversation
        most often goes on behind the answer."""
        former = [blocks for blocks in request.snapshots if blocks <= index]
        if len(former) > 1 and former[-1] == (request.prompt_len - 1) // self._block_size:
            former.pop()
        return former[-1] if former else 0

    def publish(self) -> None:
        """Lets requests begin with the snapshots that the steps planned by now write. To be called
        before a step is planned."""
        self._fresh.clear()

    @property
    def has_fresh(self) -> bool:
        """Whether the step being planned may write any snapshot."""
        return bool(self._fresh)

    def count_fresh(self, hashes: Sequence[bytes]) -> int:
        """Returns the greatest number of leading blocks behind which the step being planned may
        write a snapshot."""
        for length in range(len(hashes), 0, -1):
            if hashes[length - 1] in self._fresh:
                return length
        return 0

    # ---------------------------------------------------------------- checks

    def check_tables(self, request: Request) -> None:
        """See `WholeBlocks.check_tables`."""
        name, states = request.request_id, request.states
        for number, _ in self._pools:
            table = request.blocks[number]
            if states != [index for index, block in enumerate(table) if block != NULL_BLOCK]:
                raise IntegrityError(f"the states of request {name} are not where it has blocks")
        for length in (request.num_computed, request.num_settled):
            if length and (length - 1) // self._block_size not in states:
                raise IntegrityError(f"request {name} lacks the state that it reads")
        if states != sorted(states):
            raise IntegrityError(f"the states of request {name} are out of order")

    def check_pools(self, requests: Sequence[Request]) -> None:
        """See `WholeBlocks.check_pools`."""
        for number, pool in self._pools:
            pool.check_integrity(
                [block for block in request.blocks[number] if block != NULL_BLOCK]
                for request in requests
            )
