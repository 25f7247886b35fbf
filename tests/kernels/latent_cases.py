"""Random inputs for the kernels of latent attention, and their results beside those of the float64
references: for the interpreter's tests and the tests on a GPU. Outputs and what no token has
written are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from aioinfer.kernels.decode_plan import DecodeConfig, plan_decode
from aioinfer.kernels.latent_attention import latent_decode, make_latent_workspace
from aioinfer.kernels.latent_cache import latent_cache
from aioinfer.kernels.latent_prefill import PrefillState, latent_prefill, plan_segments, tile_config
from cases import NAN, Pair, normal, poisoned
from references import latent_cache_reference, latent_decode_reference, latent_prefill_reference


@dataclass(slots=True)
class LatentCase:
    """The shapes of a layer, and what it is computed with."""

    dtype: torch.dtype
    device: str
    num_heads: int = 6
    latent_size: int = 32
    rotary_size: int = 8
    plain_size: int = 16
    value_size: int = 12
    block_size: int = 16
    scale: float = 0.2
    config: DecodeConfig | None = None
    programs: int | None = 5

    def normal(self, *shape: int) -> torch.Tensor:
        """Returns standard normal numbers."""
        return normal(*shape, dtype=self.dtype, device=self.device)

    def poisoned(self, *shape: int) -> torch.Tensor:
        """Returns NaN."""
        return poisoned(*shape, dtype=self.dtype, device=self.device)


def decode(case: LatentCase, lengths: list[int]) -> Pair:
    """Runs `latent_decode` twice over blocks in random places, so that the second run finds what
    the first has left of the counters."""
    device, heads = case.device, case.num_heads
    blocks_of = [-(-length // case.block_size) for length in lengths]
    blocks = torch.randperm(sum(blocks_of) + 3, device=device)
    channels = case.latent_size + case.rotary_size
    # as a layer's part of a larger tensor
    cache = case.poisoned(2, len(blocks), case.block_size, channels)[1]
    tables = torch.full((len(lengths), max(blocks_of) + 1), 2**30, dtype=torch.int32, device=device)
    taken = 0
    for row, length in enumerate(lengths):
        mine = blocks[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        tables[row, : len(mine)] = mine.int()
        places = torch.arange(case.block_size, device=device)
        lines = (mine[:, None] * case.block_size + places).flatten()[:length]
        cache.view(-1, channels)[lines] = case.normal(length, channels)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    absorbed = case.normal(len(lengths), heads, case.latent_size)
    # as a part of wider queries
    rotated = case.normal(len(lengths), heads, case.rotary_size + 5)[..., 5:]
    workspace = make_latent_workspace(
        heads, case.latent_size, cache, config=case.config, programs=case.programs
    )
    for buffer in (workspace.parts.outputs, workspace.parts.maxima, workspace.parts.sums):
        buffer.fill_(NAN)
    plan_decode(workspace, lens)
    for _ in range(2):
        out = latent_decode(
            absorbed, rotated, cache, tables, lens, workspace, scale=case.scale,
            out=case.poisoned(*absorbed.shape),
        )  # fmt: skip
    assert not workspace.parts.counters.any()
    wide = (absorbed.double(), rotated.double(), cache.double())
    return out, latent_decode_reference(*wide, tables, lens, scale=case.scale)


def prefill(
    case: LatentCase, rows: list[tuple[int, int]], *, num_decodes: int, capacity: int
) -> Pair:
    """Runs `latent_prefill` for rows (tokens, length) behind `num_decodes` decodes."""
    heads, plain, value = case.num_heads, case.plain_size, case.value_size
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    tokens, device = sum(counts), torch.device(case.device)
    queries = case.normal(tokens, heads, plain + case.rotary_size)
    expanded = [case.normal(length, heads * (plain + value)) for length in lengths]
    keys = [case.normal(length, case.rotary_size) for length in lengths]
    config = tile_config(queries.element_size())
    if case.device == "cpu":
        config = replace(config, rows=16, tile=16)
    state = PrefillState.empty(tokens, heads, value, device)
    for buffer in (state.outputs, state.maxima, state.sums):
        buffer.fill_(NAN)
    out = case.poisoned(tokens, heads, value)
    segments = plan_segments(counts, lengths, num_decodes, capacity, config.rows, device)
    assert len(segments) == -(-sum(lengths[num_decodes:]) // capacity)
    for segment in segments:
        places = list(zip(segment.rows.tolist(), segment.positions.tolist(), strict=True))
        latent_prefill(
            queries,
            torch.stack([expanded[row][position] for row, position in places]),
            torch.stack([keys[row][position] for row, position in places]),
            segment, state, out, plain_size=plain, scale=case.scale, config=config,
        )  # fmt: skip
    first = sum(counts[:num_decodes])
    assert out[:first].isnan().all()
    expected, start = [], first
    for row in range(num_decodes, len(rows)):
        both = expanded[row].double().view(lengths[row], heads, plain + value)
        expected.append(
            latent_prefill_reference(
                queries[start : start + counts[row]].double(), both[..., :plain],
                keys[row].double(), both[..., plain:], scale=case.scale,
            )
        )  # fmt: skip
        start += counts[row]
    return out[first:], torch.cat(expected)


def cache_write(case: LatentCase, tokens: int) -> list[Pair]:
    """Runs `latent_cache` with one token of padding. Returns the rotated queries and the whole
    cache, the entries that must not be written included."""
    latent, rotary, device = case.latent_size, case.rotary_size, case.device
    blocks = tokens // 8 + 2
    # as parts of one projection
    both = case.normal(tokens, 3 + latent + rotary)
    queries = case.normal(tokens, case.num_heads, 5 + rotary)
    positions = torch.randint(0, 1000, (tokens,), dtype=torch.int32, device=device)
    angles = torch.rand(1000, rotary // 2, device=device) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = torch.randperm(blocks * case.block_size, device=device)[:tokens]
    slots[tokens // 2] = -1
    cache = torch.full((blocks, case.block_size, latent + rotary), 1.75, device=device)
    cache = cache.to(case.dtype)
    weight, wide = case.normal(latent), cache.double()
    expected = latent_cache_reference(
        both[:, 3:].double(), queries[..., 5:].double(), positions, cos_sin, slots, wide,
        weight.double(), 1e-6,
    )  # fmt: skip
    before = queries[..., :5].clone()
    latent_cache(both[:, 3:], queries[..., 5:], positions, cos_sin, slots, cache, weight, 1e-6)
    assert torch.equal(queries[..., :5], before)
    return [(queries[..., 5:], expected), (cache, wide)]
