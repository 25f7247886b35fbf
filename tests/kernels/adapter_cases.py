"""Tokens with random adapters, and what these add to a product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from aioinfer.kernels.adapter_tiles import AdapterTiles, RankLayout, sort_by_adapter
from aioinfer.kernels.adapters import Adapters, AdapterWorkspace


class Case(NamedTuple):
    """Tokens x [T, in] with random adapters: `of_tokens` int32 [T], -1 for none."""

    x: torch.Tensor
    adapters: Adapters
    of_tokens: torch.Tensor
    tiles: AdapterTiles
    workspace: AdapterWorkspace

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32 [T, out], what the tokens' adapters add to the product of x."""
        down, up, ranks, modules = (
            self.adapters.down, self.adapters.up, self.adapters.ranks, self.adapters.modules
        )  # fmt: skip
        added = torch.zeros(len(x), len(up), device=x.device)
        for slot in range(3):
            used, first = modules * int(ranks[slot]), slot * self.adapters.width
            tokens = torch.nonzero(self.of_tokens == slot)[:, 0]
            shrunk = x[tokens].float() @ down[slot, :used].float().t()
            added[tokens] = shrunk @ up[:, first : first + used].float().t()
        return added


def make_case(
    tokens: int, width: int, out: int, rank: int, modules: int, *,
    device: torch.device, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    """Adapters of several ranks in four slots, of which one is never read. The layout has other
    products, too."""
    generator = torch.Generator(device).manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device)
        return (made / shape[-1] ** 0.5).to(dtype)

    layout = RankLayout(4, rank, tuple(sorted({1, modules, 5})))
    most = modules * rank
    ranks = torch.tensor([rank, rank // 2, 1, rank], dtype=torch.int32, device=device)
    down = torch.full((4, most, width), torch.nan, dtype=dtype, device=device)
    up = torch.zeros(out, layout.columns(modules), dtype=dtype, device=device)
    for slot in range(3):
        used = modules * int(ranks[slot])
        down[slot, :used] = random(used, width)
        up[:, slot * most : slot * most + used] = random(out, used)
    of_tokens = torch.randint(
        -1, 3, (tokens,), generator=generator, dtype=torch.int32, device=device
    )
    of_tokens[0] = 1
    adapters = Adapters(down, up, ranks, modules)
    tiles = AdapterTiles.empty(tokens + 2, layout, dtype, device)
    sort_by_adapter(of_tokens, tiles, ranks)
    workspace = AdapterWorkspace.empty(tokens + 2, layout, width, dtype, device)
    workspace.parts.fill_(torch.nan)
    workspace.shrunk.fill_(torch.nan)
    return Case(random(tokens, width), adapters, of_tokens, tiles.views(tokens), workspace)
