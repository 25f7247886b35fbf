"""The state that schedulers report to routers of other processes: their load, and the changes of
their prefix caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioinfer.cluster.reports import Load
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.scheduler import Scheduler


def load_of(schedulers: Iterable[Scheduler]) -> Load:
    """Returns the load of some schedulers, added up."""
    total = [0] * len(Load.__struct_fields__)
    for scheduler in schedulers:
        pool, block_size = scheduler.kv_cache.leading_pool, scheduler.limits.block_size
        values = (
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_prefill_tokens,
            (pool.num_blocks - pool.num_free) * block_size,
            scheduler.num_waiting_tokens,
            pool.num_blocks * block_size,
            scheduler.limits.max_num_seqs,
        )
        total = [one + other for one, other in zip(total, values, strict=True)]
    return Load(*total)


def take_changes(pools: Sequence[BlockPool]) -> tuple[list[bytes], list[bytes]]:
    """Returns the changes of the prefix index since the last call (see `BlockPool.changed`): of the
    hashes that have changed, the ones that any of the pools holds, and the ones that none holds any
    more.

    The pools are asked which hashes they hold, so the order of changes does not matter.
    """
    changed: set[bytes] = set()
    for pool in pools:
        if pool.changed:
            changed |= pool.changed
            pool.changed = set()
    held = [h for h in changed if any(pool.has(h) for pool in pools)]
    return held, list(changed.difference(held))
