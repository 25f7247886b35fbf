"""Scales of a KV cache in float8 where the checkpoint has none: measured at the start.

A prompt of random token ids is computed, and the largest key and the largest value of each head are
read from the KV cache itself. The scale of a head is the smallest power of two with which
`MARGIN` times as much is still in range: a power of two loses nothing, and for floating-point
numbers the margin costs nothing either but the smallest of them (e4m3 has full precision over a
factor of 2 ** 14.8). Scales change what later layers compute, so it is done again until they are
stable.

Random tokens are not what a model will read, hence the margin; what exceeds it saturates. The
prompt is the same at each start, and the ranks agree on the heads that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.layers.kv_cache import FLOAT8_MAX, KVScales
from aioinfer.layers.parallel import ParallelGroup

#: Tokens of the prompt.
CALIBRATION_TOKENS = 128
#: How much larger than the largest key or value of the prompt others may be.
MARGIN = 4.0
#: Times that the prompt is computed at most.
_MAX_PASSES = 4
#: By which a scale is multiplied where all that was seen is beyond the range, or divided where all
#: of it was rounded to zero.
_COARSE_STEP = 2.0**8


def calibrate(
    layers: Sequence[KVScales],
    groups: Sequence[KVGroup],
    kv: Sequence[torch.Tensor],
    num_blocks: int,
    compute_prompt: Callable[[], None],
    group: ParallelGroup,
) -> None:
    """Sets the scales of all layers. All ranks of a model do it at the same time.

    Args:
        layers: the scales of each layer.
        groups: the layers that share block tables.
        kv: the cache of each group, [2, layers, num_blocks, block_size, num_kv_heads, head_size],
            in float8, zero where the prompt does not write.
        num_blocks: the blocks that the prompt takes in each group, from the first on.
        compute_prompt: computes it.
        group: the ranks that share the model.
    """
    for passes in range(1, _MAX_PASSES + 1):
        compute_prompt()
        largest = [torch.empty(0)] * len(layers)
        for kv_group, tensors in zip(groups, kv, strict=True):
            for index, layer in enumerate(kv_group.layers):
                stored = tensors[:, index, :num_blocks].float()
                largest[layer] = stored.abs().amax((1, 2, 4))
        is_last = passes == _MAX_PASSES
        rescaled = [_rescaled(s, m, is_last) for s, m in zip(layers, largest, strict=True)]
        new = _share(layers, rescaled, group)
        changed = any(not torch.equal(s.table[:2], n) for s, n in zip(layers, new, strict=True))
        for scales, (keys, values) in zip(layers, new, strict=True):
            scales.set(keys, values)
        if not group.all_gather_last(torch.tensor([float(changed)], device=kv[0].device)).any():
            return


def _rescaled(scales: KVScales, largest: torch.Tensor, is_last: bool) -> torch.Tensor:
    """Returns new scales [2, num_kv_heads] for the largest stored numbers of keys and values.

    A head in which the model computes NaN keeps its scale, and one of nothing but zeros has 1 in
    the end (`is_last`).
    """
    old = scales.table[:2]
    fitting = torch.exp2(torch.ceil(torch.log2(largest * old * (MARGIN / FLOAT8_MAX))))
    new = torch.where(largest == FLOAT8_MAX, old * _COARSE_STEP, fitting)
    new = torch.where(largest == 0, torch.ones_like(old) if is_last else old / _COARSE_STEP, new)
    return torch.where(torch.isfinite(new) & (new > 0), new, old)


def _share(
    layers: Sequence[KVScales], new: Sequence[torch.Tensor], group: ParallelGroup
) -> list[torch.Tensor]:
    """Returns new scales of all layers, each [2, num_kv_heads]: for a head that several ranks have
    the largest that one of them found."""
    if group.size == 1:
        return list(new)
    of_all = [torch.zeros(2, s.heads.total, 1, device=s.table.device) for s in layers]
    for scales, mine, shared in zip(layers, new, of_all, strict=True):
        shared[:, scales.heads.start : scales.heads.start + scales.heads.size, 0] = mine
    gathered = group.all_gather_last(torch.cat(of_all, dim=1)).amax(-1)
    parts = gathered.split([scales.heads.total for scales in layers], dim=1)
    return [
        part[:, scales.heads.start : scales.heads.start + scales.heads.size]
        for scales, part in zip(layers, parts, strict=True)
    ]
