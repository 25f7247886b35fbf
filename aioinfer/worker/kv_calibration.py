"""Scales of a KV cache in float8 where the checkpoint has none: measured at the start.

A prompt of random token ids is computed, and the largest key and the largest value of each head are
read from the KV cache itself. The scale of a head is the smallest power of two with which
`MARGIN` times as much is still in range: a power of two loses nothing, and for floating-point
numbers the margin costs nothing either but the smallest of them (e4m3 has full precision over a
factor of 2 ** 14.8). Scales change what later layers compute, so the measurement is repeated until
they are stable.

The shifts that are subtracted from stored keys (`KVScales.key_shifts`) are measured in the same
way, once the scales fit: the mean key of a head before RoPE, from which follows its mean over all
positions that are served. Channels that RoPE rotates slowly keep their mean, channels that it
rotates often have none. The first token is left out, since models attend to it as to nothing else
(the attention sink of Xiao et al., "Efficient Streaming Language Models", 2023) and its key lies
apart.

An error in that key moves the outputs of all tokens, so the shifts are moved, by no more than the
key would be rounded, to where it is stored exactly. Attending to itself alone, the first token has
the same key whatever follows; and where it is a sink, nearly the same whichever token it is.

Random tokens differ from the prompts that a model will read, hence the margin; numbers beyond it
saturate. The prompt is the same at each start, and the ranks agree on the heads that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.layers.kv_cache import FLOAT8_MAX, KVScales, to_float8
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RotaryTable, apply_rope

#: Tokens of the prompt.
CALIBRATION_TOKENS = 128
#: How much larger than the largest key or value of the prompt others may be.
MARGIN = 4.0
#: Positions over which the mean of keys is taken, at most: over more of them, the mean of channels
#: that rotate slowly vanishes, too, and short texts lose (notes/fp8-kv.md).
_MEAN_POSITIONS = 2048
#: Times that the prompt is computed for the first token's key, which is known to 2 ** -4 of itself
#: before, and to 2 ** -12 afterwards.
_FIRST_KEY_PASSES = 2
#: Times that the prompt is computed at most, for the scales.
_MAX_PASSES = 4
#: By which a scale is multiplied where all that was seen is beyond the range, or divided where all
#: of it was rounded to zero.
_COARSE_STEP = 2.0**8


def calibrate(
    layers: Mapping[int, KVScales],
    groups: Sequence[KVGroup],
    kv: Sequence[torch.Tensor],
    num_tokens: int,
    max_len: int,
    compute_prompt: Callable[[], None],
    group: ParallelGroup,
    world: ParallelGroup | None = None,
) -> None:
    """Sets the scales of all layers, and the key shifts where these were allowed. All ranks of a
    model do it at the same time.

    Args:
        layers: the scales of the layers that keep keys and values, by number.
        groups: the layers that share block tables; what groups of states keep is not looked at.
        kv: the cache of each group: of keys and values [2, layers, num_blocks, block_size,
            num_kv_heads, head_size] in float8, zero where the prompt does not write.
        num_tokens: of the prompt, which lies in the first blocks of each group.
        max_len: how many positions are served.
        compute_prompt: computes it.
        group: the ranks that share these layers.
        world: all ranks that share the model, which compute the prompt together; `group` by
            default.
    """
    world = world or group
    of_keys = [pair for pair in zip(groups, kv, strict=True) if not pair[0].keeps_states]
    num_blocks = -(-num_tokens // kv[0].shape[3])
    fit = partial(_fit_scales, layers, of_keys, num_blocks, compute_prompt, group, world)
    fit()
    shifted = [
        _ShiftedKeys(layers[layer], tensors[0, index, :num_blocks], num_tokens)
        for kv_group, tensors in of_keys
        for index, layer in enumerate(kv_group.layers)
        if layers[layer].key_shifts is not None
    ]
    if num_tokens > 1 and _any_rank(bool(shifted), world, kv[0].device):
        means = [keys.mean(min(max_len, _MEAN_POSITIONS)) for keys in shifted]
        for _ in range(_FIRST_KEY_PASSES):
            for keys in shifted:
                keys.shift_to_first()
            compute_prompt()
        for keys, mean in zip(shifted, means, strict=True):
            keys.shift_to_first()
            keys.shift_near(mean)
        fit()


def _fit_scales(
    layers: Mapping[int, KVScales],
    kv: Sequence[tuple[KVGroup, torch.Tensor]],
    num_blocks: int,
    compute_prompt: Callable[[], None],
    group: ParallelGroup,
    world: ParallelGroup,
) -> None:
    """Computes the prompt, which takes `num_blocks` blocks, and sets the scales until they are
    stable."""
    for passes in range(1, _MAX_PASSES + 1):
        compute_prompt()
        largest: dict[int, torch.Tensor] = {}
        for kv_group, tensors in kv:
            for index, layer in enumerate(kv_group.layers):
                stored = tensors[:, index, :num_blocks].float()
                largest[layer] = stored.abs().amax((1, 2, 4))
        is_last = passes == _MAX_PASSES
        all_scales = list(layers.values())
        rescaled = [_rescaled(layers[n], largest[n], is_last) for n in layers]
        new = _share(all_scales, rescaled, group)
        changed = any(not torch.equal(s.table[:2], n) for s, n in zip(all_scales, new, strict=True))
        for scales, (keys, values) in zip(all_scales, new, strict=True):
            scales.set(keys, values)
        if not _any_rank(changed, world, kv[0][1].device):
            return


def _any_rank(value: bool, world: ParallelGroup, device: torch.device) -> bool:
    """Returns whether `value` is true on any rank."""
    return bool(world.all_gather_last(torch.tensor([float(value)], device=device)).any())


class _ShiftedKeys:
    """The keys of a layer that stores them less `KVScales.key_shifts`, zero at first, and how these
    are set."""

    def __init__(self, scales: KVScales, blocks: torch.Tensor, num_tokens: int):
        """
        Args:
            scales: of the layer, with `key_shifts`.
            blocks: float8 [num_blocks, block_size, num_kv_heads, head_size], a view of the KV
                cache: where the keys of the prompt are stored.
            num_tokens: of the prompt.
        """
        assert scales.key_shifts is not None
        assert scales.rotary is not None
        self._scales, self._blocks, self._num_tokens = scales, blocks, num_tokens
        self._shifts, self._rotary = scales.key_shifts, scales.rotary

    @torch.inference_mode()
    def mean(self, max_len: int) -> torch.Tensor:
        """Returns the mean keys over `max_len` positions, float32 [num_kv_heads, head_size], from
        keys that are stored without shifts."""
        before = _before_rope(self._read(self._num_tokens), self._rotary)[1:]
        return _finite(apply_rope(before.mean(0, keepdim=True), *self._rotary.mean(max_len))[0])

    @torch.inference_mode()
    def shift_to_first(self) -> None:
        """Adds to the shifts what is stored of the first token's key. Repeated, with the prompt
        computed in between, they come to that key: each time what is missing is a sixteenth."""
        self._shifts += _finite(self._read(1)[0])

    @torch.inference_mode()
    def shift_near(self, wanted: torch.Tensor) -> None:
        """Sets the shifts, which are the first token's key, to what is nearest to `wanted`
        [num_kv_heads, head_size] of those with which that key is stored exactly."""
        stored = to_float8(self._shifts - wanted, self._scales.table[2]).float()
        self._shifts -= stored * self._scales.keys[:, None]

    def _read(self, count: int) -> torch.Tensor:
        """Returns the keys of the first `count` tokens less the shifts."""
        return self._blocks.flatten(0, 1)[:count].float() * self._scales.keys[:, None]


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(x), x, 0)


def _before_rope(keys: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    """Returns the keys of the first positions [T, heads, head_size] as they were before RoPE."""
    cos, sin = rotary.at(torch.arange(len(keys), device=keys.device))
    factors = cos.square() + sin.square()  # not 1 where the variant scales cosines and sines
    return apply_rope(keys, cos / factors, -sin / factors)


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
    if group.size == 1 or not layers:
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
