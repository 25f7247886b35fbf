"""Planning half of the store of KV: brings the transfers of `scheduler.kv_store` to the workers,
and tells the store which loads have ended."""

from __future__ import annotations

from typing import Any

from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.kv_store import KVStore


class Planning(StepFeature):
    """See `StepFeature`."""

    name = "kv_store"
    reports = KVLoaded

    def __init__(self, host: Any):
        super().__init__(host)
        self.announces = host.config.cache.host_bytes > 0

    @property
    def _store(self) -> KVStore | None:
        store: KVStore | None = self.host.scheduler().kv_cache.store
        return store

    def announce(self) -> Section | None:
        """See `StepFeature.announce`."""
        store = self._store
        if store is None:
            return None
        moves = (
            store.take_loads(),
            store.take_reads(),
            store.take_saves(),
            store.take_deletes(),
            store.take_awaited(),
            store.take_sources(),
        )
        return KVMoves.of(*moves) if any(moves) else None

    def take_report(self, section: Section) -> None:
        """See `StepFeature.take_report`."""
        assert isinstance(section, KVLoaded)
        if (store := self._store) is not None:
            columns = section.tickets, section.counts, section.micros
            for ticket, count, micros in zip(*(each.tolist() for each in columns), strict=True):
                store.finish(ticket, count, micros / 1e6 if micros >= 0 else None)
