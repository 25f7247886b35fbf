"""Towers: what computes the embeddings of pictures, in plain torch on any device, with some kernels
on GPUs: a layer is few launches there, since a step of decodes is often shorter than the time in
which the host launches a tower.

A tower's modules have the names of the checkpoint's, so that its tensors are loaded by name. Every
tensor-parallel rank has the whole tower and computes all pictures: a tower has a tenth of the text
model's weights or less, and so no embeddings cross between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from aioinfer.errors import ConfigError
from aioinfer.models.replicated import ReplicatedModule
from aioinfer.models.vision.format import PictureFormat

#: Activations of towers by the names that configurations have.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns an activation by its name. Raises `ConfigError` for an unknown one."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"the vision tower's activation {name!r} is not supported")
    return ACTIVATIONS[name]


class Tower(ReplicatedModule):
    """Base class of towers. Their `prefix` is without the "model." that may stand before.

    Attributes:
        format: how pictures come.
        width: channels of an embedding: the text model's hidden size, times 1 + `num_deep`.
        num_deep: how many further vectors an embedding has, which are added to the stream behind
            the first layers of the text model (DeepStack, Meng et al. 2024).
    """

    num_deep = 0

    def __init__(self, format: PictureFormat, hidden_size: int):
        super().__init__()
        self.format = format
        self._hidden_size = hidden_size
        self._channels: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """See the class."""
        return self._hidden_size * (1 + self.num_deep)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns pixels uint8 [..., 3] as the tower was trained for them, in its dtype."""
        if self._channels is None:  # once: the copy to a GPU waits for all that was launched
            channels = self.format.mean, self.format.std
            self._channels = torch.tensor(channels, dtype=torch.float32, device=pixels.device)
        mean, std = self._channels
        return pixels.float().mul_(1 / 255).sub_(mean).div_(std).to(self.dtype)

    def as_reference(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns normalised pixels [N, height, width, 3] of a picture in the order in which the
        family's processor in transformers has them; tests compare both."""
        return normed.permute(0, 3, 1, 2)

    def encode(
        self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Returns the embeddings [n, width] of pictures, one picture's behind the other's.

        Args:
            pixels: of each picture uint8 [N, height, width, 3].
            grids: of each; see `ProcessedPicture`.
        """
        raise NotImplementedError


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Returns attention [T, heads * size] within sequences that lie one behind the other; q, k and
    v are [T, heads, size], where k and v may have fewer heads. Adjacent sequences of equal lengths
    are one call."""
    found, start = [], 0
    index = 0
    while index < len(lengths):
        length, count = lengths[index], 1
        while index + count < len(lengths) and lengths[index + count] == length:
            count += 1
        part = slice(start, start + length * count)
        shaped = (each[part].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v))
        queries, keys, values = shaped
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        found.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
        start, index = part.stop, index + count
    return found[0] if len(found) == 1 else torch.cat(found)


class Lengths:
    """The lengths of sequences of patches that lie one behind the other.

    Attributes:
        given: of each.
        starts: int32 [n + 1], where each begins, and where the last one ends, on a GPU that
            FlashAttention-2 supports, from Ampere on; None elsewhere.
    """

    def __init__(self, given: Sequence[int], device: torch.device):
        self.given = given
        self._longest = max(given)
        self.starts: torch.Tensor | None = None
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            starts = torch.tensor([0, *given]).cumsum(0, dtype=torch.int32)
            # a copy from other memory waits for all that was launched
            self.starts = starts.pin_memory().to(device, non_blocking=True)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Returns what the function `attend` does, for q, k and v [T, heads, size]: in 16 bits on
        a GPU in one launch, by FlashAttention-2 (Dao 2023) as torch has it."""
        if self.starts is None or q.element_size() != 2 or q.shape[2] % 8:
            return attend(q, k, v, self.given, scale)
        lengths = self.starts, self.starts, self._longest, self._longest
        found: torch.Tensor = torch.ops.aten._flash_attention_forward.default(
            q, k, v, *lengths, 0.0, False, False, scale=scale
        )[0]
        return found.flatten(1)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the patches of a step are, for the layers of a tower.

    Attributes:
        cos, sin: of `rotation`.
        lengths: of the sequences within which they attend.
        has_kernels: whether layers use kernels.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    lengths: Lengths
    has_kernels: bool


def add_norm(
    x: torch.Tensor, addend: torch.Tensor | None, norm: nn.Module, *, has_kernels: bool
) -> torch.Tensor:
    """Adds `addend` to x [T, size] in place, both contiguous, and returns the norm of the sum."""
    if addend is not None and has_kernels and isinstance(norm, nn.LayerNorm):
        from aioinfer.kernels.norm import add_layer_norm

        out = torch.empty_like(x)
        add_layer_norm(x, addend, norm.weight, norm.bias, norm.eps, out)
        return out
    if addend is not None:
        x.add_(addend)
    found: torch.Tensor = norm(x)
    return found


def activated(x: torch.Tensor, linear: nn.Linear, name: str) -> torch.Tensor:
    """Returns the activation of a linear layer's outputs [..., out]. On a GPU cuBLAS computes the
    tanh form of GELU along the way, in 16 bits."""
    if name == "gelu_pytorch_tanh" and x.is_cuda and x.element_size() == 2:
        found: torch.Tensor = torch._addmm_activation(
            linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True
        )
        return found.view(*x.shape[:-1], -1)
    return activation(name)(linear(x))


def rotation(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for `rotated` the factors [T, 1, ..., size] of angles [T, ..., size / 2]: cosines,
    and sines with the sign that belongs to the first and to the second half of the channels."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, ..., size] rotated, computed in float32, by factors of `rotation`;
    channels i and i + size / 2 are a pair."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return torch.addcmul(wide * cos, torch.cat((second, first), dim=-1), sin).to(x.dtype)


def axial_angles(
    rows: torch.Tensor, columns: torch.Tensor, head_size: int, theta: float = 10_000.0
) -> torch.Tensor:
    """Returns angles [T, head_size / 2] of patches at places int64 [T] each: the first half of the
    pairs is rotated by the row, the second by the column."""
    size = head_size // 2
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=rows.device) / size
    inverse = 1.0 / theta**exponents
    return torch.cat([torch.outer(each.float(), inverse) for each in (rows, columns)], dim=1)


def block_places(height: int, width: int, merge: int, device: torch.device) -> torch.Tensor:
    """Returns rows and columns int64 [2, height * width] of a grid's patches in the order of blocks
    of `merge` x `merge` patches."""
    places = torch.stack(
        torch.meshgrid(
            torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
        )
    )
    shape = (2, height // merge, merge, width // merge, merge)
    return places.view(shape).transpose(2, 3).flatten(1)


def block_patches(pixels: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Returns the patches [height * width / patch**2, 3, patch, patch] of pixels [height, width,
    3], in the order of `block_places`."""
    height, width, _ = pixels.shape
    side = patch * merge
    shape = (height // side, merge, patch, width // side, merge, patch, 3)
    return pixels.view(shape).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)


def merged_squares(x: torch.Tensor, side: int) -> torch.Tensor:
    """Returns the patches x [N, patches, size] of square grids as squares of `side` x `side`
    patches, one behind the other: [N, squares, side * side * size]."""
    width = math.isqrt(x.shape[1])
    squares = x.unflatten(1, (width // side, side, width // side, side)).transpose(2, 3)
    return squares.flatten(3).flatten(1, 2)


def bilinear(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Returns a square table of position embeddings [side * side, size] at places int64 [T] of a
    grid of another size, by bilinear interpolation with aligned corners: [T, size]."""
    side = math.isqrt(len(table))

    def taps(place: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = place.float() * (side - 1) / max(size - 1, 1)
        below = at.floor()
        rest = at - below
        lower = below.long()
        return torch.stack((lower, (lower + 1).clamp(max=side - 1))), torch.stack((1 - rest, rest))

    (row_at, row_weight), (column_at, column_weight) = taps(rows, height), taps(columns, width)
    found = torch.zeros(len(rows), table.shape[1], dtype=torch.float32, device=table.device)
    for i in range(2):
        for j in range(2):
            weight = (row_weight[i] * column_weight[j]).unsqueeze(1)
            found += table[row_at[i] * side + column_at[j]] * weight
    return found.to(table.dtype)
