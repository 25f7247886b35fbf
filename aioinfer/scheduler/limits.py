"""The limits of a scheduler: blocks, slots and tokens a step, and the order of requests. The engine
makes the limits from the configuration and from the workers' reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.plan import COPY_BYTES, GROWTH_BYTES, LOOKAHEAD_BYTES, MAX_FIXED_BYTES, ROW_BYTES
from aioinfer.scheduler.kv_connector import (
    DiskConnector,
    DiskLimits,
    KVConnector,
)
from aioinfer.scheduler.peer_connector import PeerConnector, PeerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits of a scheduler, and how it orders requests.

    Attributes:
        num_blocks: KV blocks of each group of layers.
        block_size: tokens a KV block.
        max_num_seqs: slots, each for a running request.
        token_budget: the maximum of tokens that a step computes.
        prefill_cap: the maximum of prefill tokens in a step that also decodes.
        paces_prefill: whether the predicted time of such a step bounds them, too (see
            `prefill_pacing`).
        target_itl_s: the time that such a step may take, in seconds; None: as throughput asks for.
        prefix_caching: whether KV blocks of finished requests are kept, where the groups allow it.
        num_stages: of the workers' pipeline; see `MicroBatches`.
        max_lookahead: the maximum of lookahead rows in a step (see `ipc.lookahead`).
        step_times: (rows, seconds, whether with lookahead) of decode steps, as the workers measured
            them at their start.
        num_stored: KV blocks of each group that memory of the host holds beside; empty for none.
        disk: what files hold beside; None for nothing.
        peers: how prompts are handed over between servers; None if they are not.
        plan_ahead: whether a request may be planned while its last token is on its way; with one
            stage that is up to the engine alone.
        groups: the groups of layers; one in which every token attends to all before it, if none
            are given.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    token_budget: int
    prefill_cap: int
    paces_prefill: bool = False
    target_itl_s: float | None = None
    prefix_caching: bool = True
    num_stages: int = 1
    max_lookahead: int = 0
    step_times: Sequence[tuple[int, float, bool]] = ()
    num_stored: tuple[int, ...] = ()
    disk: DiskLimits | None = None
    peers: PeerLimits | None = None
    plan_ahead: bool = True
    groups: tuple[KVGroup, ...] = (KVGroup(AttentionSpec(1, 1), (0,)),)

    @property
    def keeps_states(self) -> bool:
        """Whether a layer of the model keeps a state."""
        return any(group.keeps_states for group in self.groups)

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether each prompt is computed in one step, since the model keeps nothing of it: an
        encoder, in which each token attends to all of them."""
        return not self.groups

    def connectors(self) -> list[KVConnector]:
        """Returns new connectors of a store."""
        found: list[KVConnector] = []
        if self.peers is not None:
            found.append(PeerConnector(self.peers))
        if self.disk is not None:
            found.append(DiskConnector(self.disk))
        return found

    def check_plan_bytes(self, max_replacement_blocks: int) -> None:
        """Raises `ConfigError` unless the fixed part of the largest plan has the room that the
        ring's bound leaves for it.

        Args:
            max_replacement_blocks: `KVCacheManager.max_replacement_blocks`.
        """
        tables = self.max_num_seqs + self.token_budget // self.block_size
        growth = tables * len(self.groups)
        growth += self.max_num_seqs * max_replacement_blocks
        rows = self.max_num_seqs * (ROW_BYTES + COPY_BYTES * len(self.groups))
        rows += self.max_lookahead * (ROW_BYTES + LOOKAHEAD_BYTES)
        if rows + growth * GROWTH_BYTES > MAX_FIXED_BYTES:
            raise ConfigError(
                "the plan of a step could be too long for the ring: lower "
                "scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or raise "
                "cache.block_size"
            )
