"""Attention over the paged KV cache without Triton: on CPUs, and for shapes that the kernels lack.

`TorchAttention` gathers a sequence's blocks and calls torch's own attention: decodes of about equal
length in one call, every other row in a call of its own. How rows are grouped is worked out once a
step for each KV group and used by all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.layers.distance_bias import DistanceBias
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.step import HostRows, Step


@dataclass(slots=True)
class Gather:
    """Rows of a step that the torch backend computes together; made once a step for each window,
    used by every layer.

    Attributes:
        first, count: the rows' tokens: `count` decodes, or the tokens of one row.
        blocks: int32 [n], the KV blocks to gather, or None if the step itself has all keys.
        shape: (sequences, tokens of the longest) of the gathered keys; (0, tokens) for the
            tokens of one row.
        mask: what may be attended to, to be added to the scores, or None for all (or plainly
            causal).
        padding: int64 [m], the positions of gathered keys past their sequence's end.
        distances: float32, how far each key is behind the query, negative for later keys: [rows, 1,
            1, tokens of the longest], or [count, tokens] of one row.
        bias: what is added to the scores where there is a bias by distance, once a layer has
            computed it for all.
    """

    first: int
    count: int
    blocks: torch.Tensor | None
    shape: tuple[int, int]
    mask: torch.Tensor | None
    padding: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class TorchAttention:
    """Writes a step's keys and values to the cache of a layer, then attends.

    Args:
        shape: of the layer.
        group: the number of its KV group.
        sinks: float32 [num_heads], a logit of each query head that takes part in the sum of its
            softmax and has no value; or none.
        slopes: float32 [num_heads], of each query head how much a key's score falls with every
            token between the key and the query (ALiBi, Press et al. 2022), after scale and soft
            cap; or none.
        distance_bias: added to the scores, in layers whose heads share no keys; or none.

    Attributes:
        is_read: whether later layers read the cache: a step then keeps what is written to it.
    """

    is_read = False

    def __init__(
        self,
        shape: AttentionShape,
        group: int,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        distance_bias: DistanceBias | None = None,
    ):
        self._shape = shape
        self._group = group
        self._sinks = None if sinks is None else sinks.view(shape.num_kv_heads, -1)
        self._slopes, self._distance_bias = slopes, distance_bias

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        step: Step,
    ) -> torch.Tensor:
        """Returns [T, num_heads, head_size].

        Args:
            queries: [T, num_heads, head_size], rotated. keys, values: [T, num_kv_heads,
                head_size], likewise.
            cache: the layer's; gets the step's keys and values.
            step: with `host`; without padding.
        """
        inputs = step.inputs.groups[self._group]
        stored = cache.write(inputs.slot_mapping, keys, values)
        if self.is_read:
            step.memo[TorchAttention, id(cache)] = stored
        return self._attend_all(queries, stored, cache, step)

    def read(self, queries: torch.Tensor, cache: KVCache, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, head_size], where the cache is of an earlier layer, which
        `is_read` and has written the step's keys and values; arguments as above."""
        return self._attend_all(queries, step.memo[TorchAttention, id(cache)], cache, step)

    def _attend_all(
        self,
        queries: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        step: Step,
    ) -> torch.Tensor:
        # a prompt that is computed whole attends to what later steps will read
        keys, values = cache.read(*stored, queries.dtype)
        gathers = self._gathers_of(step, cache, queries.dtype)
        if len(gathers) == 1:
            return self._attend(queries, keys, values, cache, gathers[0])
        output = torch.empty_like(queries)
        for gather in gathers:
            tokens = slice(gather.first, gather.first + gather.count)
            output[tokens] = self._attend(
                queries[tokens], keys[tokens], values[tokens], cache, gather
            )
        return output

    def _gathers_of(self, step: Step, cache: KVCache, dtype: torch.dtype) -> list[Gather]:
        """Returns how the rows of a step are divided into calls, worked out once a step."""
        memo = (TorchAttention, self._group)
        gathers: list[Gather] | None = step.memo.get(memo)
        if gathers is None:
            assert step.host is not None
            tables = step.inputs.groups[self._group].block_tables
            gathers = plan_gathers(
                step.host, tables, cache.keys, self._shape.window, dtype,
                with_distances=self._slopes is not None or self._distance_bias is not None,
            )  # fmt: skip
            step.memo[memo] = gathers
        return gathers

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

        The query heads that share a KV head are the queries of one product.
        """
        rows, length = gather.shape
        kv_heads, head_size = self._shape.num_kv_heads, self._shape.head_size
        assert gather.blocks is not None
        grouped = queries.reshape(rows, kv_heads, -1, head_size)
        all_keys, all_values = self._gather(cache, gather.blocks, queries.dtype)
        # a former owner of the block may have left NaN there, which no mask hides
        if gather.padding is not None:
            all_keys.index_fill_(0, gather.padding, 0)
            all_values.index_fill_(0, gather.padding, 0)
        paged = (rows, -1, kv_heads, head_size)
        attended = self._dot_product(
            grouped,
            all_keys.view(paged)[:, :length].transpose(1, 2),
            all_values.view(paged)[:, :length].transpose(1, 2),
            self._mask_of(gather, grouped),
            is_causal=False,
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
            gathered = self._gather(cache, gather.blocks, queries.dtype)
            keys, values = (kv[: gather.shape[1]] for kv in gathered)
        queries = queries.transpose(0, 1).unsqueeze(0)
        mask = self._mask_of(gather, queries)
        attended = self._dot_product(
            queries,
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            mask,
            is_causal=mask is None and gather.count > 1,
        )
        return attended[0].transpose(0, 1)

    def _mask_of(self, gather: Gather, queries: torch.Tensor) -> torch.Tensor | None:
        """Returns what is added to the scores of queries [B, H, Q, D]: the gather's mask, and what
        distances take from them with ALiBi, or add by a bias."""
        if self._distance_bias is not None:
            if gather.bias is None:
                gather.bias = self._bias_of(gather, self._distance_bias).to(queries.dtype)
            return gather.bias
        if self._slopes is None:
            return gather.mask
        assert gather.distances is not None
        # decodes have the heads that share keys in the place of Q
        taken = self._slopes.view(queries.shape[1], -1, 1) * gather.distances
        mask = (-taken).masked_fill_(gather.distances < 0, -torch.inf).to(queries.dtype)
        return mask if gather.mask is None else mask + gather.mask

    @staticmethod
    def _bias_of(gather: Gather, bias: DistanceBias) -> torch.Tensor:
        """Returns the biases of a gather's scores, with its mask."""
        assert gather.distances is not None
        found = bias.of_keys_before(gather.distances)
        if gather.shape[0]:  # decodes: [heads, rows, 1, 1, tokens]
            found = found.squeeze(2).transpose(0, 1)
        found = found.masked_fill(gather.distances < 0, -torch.inf)
        return found if gather.mask is None else found + gather.mask

    @staticmethod
    def _gather(
        cache: KVCache, blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of blocks, each [tokens, num_kv_heads, head_size]."""
        keys, values = (kv.index_select(0, blocks) for kv in (cache.keys, cache.values))
        return cache.read(keys.flatten(0, 1), values.flatten(0, 1), dtype)

    def _dot_product(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
    ) -> torch.Tensor:
        """Returns attention [B, Hq, Q, D] of queries [B, Hq, Q, D] to keys and values [B, Hkv, K,
        D], `mask` added to the scores. torch's own attention knows no soft caps and no sinks: with
        them all scores are written."""
        shape, is_grouped = self._shape, queries.shape[1] != keys.shape[1]
        if not shape.soft_cap and self._sinks is None:
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=is_causal,
                scale=shape.scale,
                enable_gqa=is_grouped,
            )
        if is_grouped:
            keys, values = (
                kv.repeat_interleave(queries.shape[1] // kv.shape[1], dim=1)
                for kv in (keys, values)
            )
        scores = queries.float() @ keys.float().transpose(-1, -2) * shape.scale
        if shape.soft_cap:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -torch.inf)
        elif mask is not None:
            scores += mask
        weights = scores.softmax(-1)
        if self._sinks is not None:  # decodes have the heads that share keys in the place of Q
            sinks = self._sinks.view(queries.shape[1], -1, 1)
            weights *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
        return weights.to(values.dtype) @ values


def plan_gathers(
    host: HostRows,
    tables: torch.Tensor,
    keys: torch.Tensor,
    window: int | None,
    dtype: torch.dtype | None = None,
    *,
    with_distances: bool = False,
) -> list[Gather]:
    """Divides the rows of a step into calls of attention over a cache like `keys` [num_blocks,
    block_size, ...].

    Blocks before the window of all of a row's tokens are left out: the row is computed as if it
    began behind them.

    Args:
        host: the lengths of the rows.
        tables: int32 [R, max_blocks], their KV blocks.
        keys: [num_blocks, block_size, ...], for block size and device.
        window: of the layer, or None.
        dtype: of the arithmetic; by default that of `keys`.
        with_distances: whether to compute `Gather.distances`.
    """
    block_size, dtype = keys.shape[1], dtype or keys.dtype
    longer = (row for row, count in enumerate(host.query_lens) if count > 1)
    decodes = next(longer, len(host.query_lens))
    rows = zip(host.seq_lens, host.query_lens, strict=True)
    skipped = [
        0 if window is None else max(0, length - count - window + 1) // block_size
        for length, count in rows
    ]
    lengths = [
        length - blocks * block_size for length, blocks in zip(host.seq_lens, skipped, strict=True)
    ]
    if any(skipped):
        columns = torch.tensor(skipped)[:, None] + torch.arange(tables.shape[1])
        tables = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1).to(tables.device))
    gathers = [
        _gather_decodes(tables, first, lengths[first:last], keys, window, dtype)
        for first, last in _group_by_length(lengths[:decodes], block_size)
    ]
    first = decodes
    for row in range(decodes, len(lengths)):
        gathers.append(
            _gather_row(tables[row], first, host.query_lens[row], lengths[row], keys, window, dtype)
        )
        first += host.query_lens[row]
    if with_distances:
        first = 0
        for gather in gathers:
            last = first + max(1, gather.shape[0])
            gather.distances = _distances(gather, lengths[first:last]).to(keys.device)
            first = last
    return gathers


def _distances(gather: Gather, lengths: list[int]) -> torch.Tensor:
    """Returns `Gather.distances` of rows of these lengths."""
    if gather.shape[0]:
        queries = torch.tensor(lengths)[:, None, None, None] - 1
    else:
        queries = torch.arange(lengths[0] - gather.count, lengths[0])[:, None]
    return queries - torch.arange(gather.shape[1], dtype=torch.float32)


def _group_by_length(lengths: list[int], block_size: int) -> list[tuple[int, int]]:
    """Returns runs (first, last) of rows so that padding to the longest row of a run at most
    doubles its blocks."""
    runs: list[tuple[int, int]] = []
    first = longest = total = 0
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        new_longest, new_total = max(longest, blocks), total + blocks
        if row > first and new_longest * (row + 1 - first) > 2 * new_total:
            runs.append((first, row))
            first, longest, total = row, blocks, blocks
        else:
            longest, total = new_longest, new_total
    return [*runs, (first, len(lengths))] if lengths else []


def _gather_decodes(
    tables: torch.Tensor,
    first: int,
    lengths: list[int],
    cache: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> Gather:
    rows, longest, block_size = len(lengths), max(lengths), cache.shape[1]
    blocks = -(-longest // block_size)
    ends = torch.tensor(lengths)[:, None]
    positions = torch.arange(longest)  # tokens beyond the longest row are cut off
    hidden = positions >= ends
    padding = None
    if hidden.any():
        gathered = torch.arange(rows)[:, None] * (blocks * block_size) + positions
        padding = gathered[hidden].to(cache.device)
    if window is not None:
        hidden |= positions < ends - window
    mask = _mask(hidden, dtype, cache.device)[:, None, None] if hidden.any() else None
    blocks_of_rows = tables[first : first + rows, :blocks].flatten()
    return Gather(first, rows, blocks_of_rows, (rows, longest), mask, padding)


def _gather_row(
    table: torch.Tensor,
    first: int,
    count: int,
    length: int,
    cache: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> Gather:
    is_whole = count == length
    blocks = None if is_whole else table[: -(-length // cache.shape[1])]
    mask = None
    if not (is_whole or count == 1) or (window is not None and length > window):
        queries, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = _mask(hidden, dtype, cache.device)
    return Gather(first, count, blocks, (0, length), mask)


def _mask(hidden: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the mask to be added to the scores: minus infinity where `hidden`."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
