"""Paged attention: what a layer needs to know of a step, and the attention layer itself.

The metadata is made once a step by the worker and read by every layer. On a CPU the layer computes
in plain torch; on a GPU the Triton kernels of `kernels/` take its place behind the same call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(slots=True)
class KVCache:
    """The KV cache of one layer of one rank.

    Attributes:
        keys, values: [num_blocks, block_size, num_kv_heads, head_size] in the cache's dtype.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Which tokens of a step attend to which KV blocks. R rows (requests), T tokens; decodes come
    first.

    Attributes:
        slot_mapping: int64 [T], where each token's key and value go: block * block_size + offset.
        block_tables: int32 [R, max_blocks], the KV blocks of each row; entries past a row's length
            may be any block.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], tokens of each row that are in the cache once this step's are written.
        num_decodes: how many rows, counted from the first, have exactly one token until one has
            more.
        query_lens_cpu: the tokens of each row, on the host.
        seq_lens_cpu: `seq_lens`, on the host.
        gathers: what the torch backend has worked out for the step, by sliding window.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    query_lens_cpu: list[int]
    seq_lens_cpu: list[int]
    gathers: dict[int | None, list[Gather]] = field(default_factory=dict)


@dataclass(slots=True)
class Gather:
    """Rows of a step that the torch backend computes together; made once a step for each window,
    used by every layer.

    Attributes:
        first, count: the rows' tokens: `count` decodes, or the tokens of one row.
        blocks: int64 [n], the KV blocks to bring together, or None if the step itself has all keys.
        shape: (sequences, tokens of the longest) of what is brought together; (0, tokens) for the
            tokens of one row.
        mask: what may be attended to, to be added to the scores, or None for all (or plainly
            causal).
        padding: int64 [m], the positions of what is brought together that lie past their sequence's
            end.
    """

    first: int
    count: int
    blocks: torch.Tensor | None
    shape: tuple[int, int]
    mask: torch.Tensor | None
    padding: torch.Tensor | None = None


class PagedAttention:
    """Attention of a layer over its paged KV cache: writes the step's keys and values, then
    attends.

    This is the backend in plain torch. It brings a sequence's blocks together and calls torch's own
    attention: decodes of about equal length in one call, every other row in a call of its own.

    Args:
        num_heads, num_kv_heads, head_size: of this rank.
        scale: of the scores.
        sliding_window: how many tokens a token sees, itself included, or None for all.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
    ):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Returns [T, num_heads, head_size].

        Args:
            queries: [T, num_heads, head_size]. keys, values: [T, num_kv_heads, head_size].
            cache: the layer's; gets the step's keys and values.
            metadata: the step's.
        """
        cache.keys.flatten(0, 1).index_copy_(0, metadata.slot_mapping, keys)
        cache.values.flatten(0, 1).index_copy_(0, metadata.slot_mapping, values)
        gathers = metadata.gathers.get(self.sliding_window)
        if gathers is None:
            gathers = metadata.gathers[self.sliding_window] = plan_gathers(
                metadata, cache.keys, self.sliding_window
            )
        if len(gathers) == 1:
            return self._attend(queries, keys, values, cache, gathers[0])
        output = torch.empty_like(queries)
        for gather in gathers:
            tokens = slice(gather.first, gather.first + gather.count)
            output[tokens] = self._attend(
                queries[tokens], keys[tokens], values[tokens], cache, gather
            )
        return output

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        gather: Gather,
    ) -> torch.Tensor:
        if gather.shape[0]:
            return self._attend_decodes(queries, cache, gather)
        return self._attend_row(queries, keys, values, cache, gather)

    def _attend_decodes(
        self, queries: torch.Tensor, cache: KVCache, gather: Gather
    ) -> torch.Tensor:
        """Attends one token of each of several sequences.

        The heads that share a KV head stand in as its queries.
        """
        rows, length = gather.shape
        assert gather.blocks is not None
        grouped = queries.view(rows, self.num_kv_heads, -1, self.head_size)
        all_keys, all_values = (
            kv.index_select(0, gather.blocks).flatten(0, 1) for kv in (cache.keys, cache.values)
        )
        # a former owner of the block may have left NaN there, which no mask hides
        if gather.padding is not None:
            all_keys.index_fill_(0, gather.padding, 0)
            all_values.index_fill_(0, gather.padding, 0)
        paged = (rows, -1, self.num_kv_heads, self.head_size)
        attended = F.scaled_dot_product_attention(
            grouped,
            all_keys.view(paged)[:, :length].transpose(1, 2),
            all_values.view(paged)[:, :length].transpose(1, 2),
            attn_mask=gather.mask,
            scale=self.scale,
        )
        return attended.reshape(queries.shape)

    def _attend_row(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        gather: Gather,
    ) -> torch.Tensor:
        """Attends the tokens of one sequence to everything of it that is in the cache."""
        if gather.blocks is not None:
            keys = cache.keys.index_select(0, gather.blocks).flatten(0, 1)[: gather.shape[1]]
            values = cache.values.index_select(0, gather.blocks).flatten(0, 1)[: gather.shape[1]]
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=gather.mask,
            is_causal=gather.mask is None and gather.count > 1,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended[0].transpose(0, 1)


def plan_gathers(
    metadata: AttentionMetadata, keys: torch.Tensor, window: int | None
) -> list[Gather]:
    """Divides the rows of a step into calls of attention over a cache like `keys` [num_blocks,
    block_size, ...].

    What lies before the window of all of a row's tokens is not brought together: the row is as if
    it began behind it.
    """
    decodes, block_size = metadata.num_decodes, keys.shape[1]
    rows = zip(metadata.seq_lens_cpu, metadata.query_lens_cpu, strict=True)
    skipped = [
        0 if window is None else max(0, length - count - window + 1) // block_size
        for length, count in rows
    ]
    lengths = [
        length - blocks * block_size
        for length, blocks in zip(metadata.seq_lens_cpu, skipped, strict=True)
    ]
    tables = metadata.block_tables
    if any(skipped):
        columns = torch.tensor(skipped)[:, None] + torch.arange(tables.shape[1])
        tables = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1).to(tables.device))
    gathers = [
        _gather_decodes(tables, first, lengths[first:last], keys, window)
        for first, last in _alike(lengths[:decodes], block_size)
    ]
    first = decodes
    for row in range(decodes, len(lengths)):
        gathers.append(
            _gather_row(
                tables[row], first, metadata.query_lens_cpu[row], lengths[row], keys, window
            )
        )
        first += metadata.query_lens_cpu[row]
    return gathers


def _alike(lengths: list[int], block_size: int) -> list[tuple[int, int]]:
    """Returns runs (first, last) of rows so that padding at most doubles what a run's rows hold on
    average."""
    runs: list[tuple[int, int]] = []
    first = longest = held = 0
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        longest_then, held_then = max(longest, blocks), held + blocks
        if row > first and longest_then * (row + 1 - first) > 2 * held_then:
            runs.append((first, row))
            first, longest, held = row, blocks, blocks
        else:
            longest, held = longest_then, held_then
    return [*runs, (first, len(lengths))] if lengths else []


def _gather_decodes(
    tables: torch.Tensor, first: int, lengths: list[int], cache: torch.Tensor, window: int | None
) -> Gather:
    rows, longest, block_size = len(lengths), max(lengths), cache.shape[1]
    blocks = -(-longest // block_size)
    ends = torch.tensor(lengths)[:, None]
    positions = torch.arange(longest)  # what the last blocks hold beyond the longest row is cut off
    hidden = positions >= ends
    padding = None
    if hidden.any():
        brought = torch.arange(rows)[:, None] * (blocks * block_size) + positions
        padding = brought[hidden].to(cache.device)
    if window is not None:
        hidden |= positions < ends - window
    mask = _mask(hidden, cache)[:, None, None] if hidden.any() else None
    wanted = tables[first : first + rows, :blocks].flatten()
    return Gather(first, rows, wanted, (rows, longest), mask, padding)


def _gather_row(
    table: torch.Tensor,
    first: int,
    count: int,
    length: int,
    cache: torch.Tensor,
    window: int | None,
) -> Gather:
    alone = count == length
    blocks = None if alone else table[: -(-length // cache.shape[1])]
    mask = None
    if not (alone or count == 1) or (window is not None and length > window):
        queries, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = _mask(hidden, cache)
    return Gather(first, count, blocks, (0, length), mask)


def _mask(hidden: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Returns what to add to the scores, with the cache's dtype and device: minus infinity where
    `hidden`."""
    return (
        torch.zeros(hidden.shape, dtype=cache.dtype)
        .masked_fill_(hidden, -torch.inf)
        .to(cache.device)
    )
