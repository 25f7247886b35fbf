"""The fused projection of the newest tokens, from which attention computes queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.attention_tiles import RotationArguments, RotationConfig


class Rotation:
    """Norm and RoPE of a layer's queries and keys, and norm of its values.

    Args:
        cos_sin: float32 [max_pos, R], R <= D the rotated part of a head: R / 2 cosines, then R / 2
            sines; None: there is no rotation.
        q_weight, k_weight: [D] of the norms, both or neither.
        eps: of the norms.
        sections: of the pairs of channels, where tokens have three positions: see
            `layers.rotary.Sections`.
        norm_last: whether the norms follow the rotation.
        value_norm_eps: of an RMSNorm of values by head, which has no weight; None: there is none.

    Attributes:
        arguments, config: the same, as kernels take them.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """

    def __init__(
        self,
        cos_sin: torch.Tensor | None = None,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        *,
        sections: tuple[int, int, int, bool] | None = None,
        norm_last: bool = False,
        value_norm_eps: float | None = None,
    ):
        size = 0 if cos_sin is None else cos_sin.shape[1]
        if cos_sin is not None and (
            cos_sin.dtype != torch.float32 or size % 2 or cos_sin.stride(1) != 1
        ):
            raise ValueError(
                f"cos_sin must be float32 [max_pos, R], not {cos_sin.dtype} {tuple(cos_sin.shape)}"
            )
        if (q_weight is None) != (k_weight is None):
            raise ValueError("the norms come both or not at all")
        stride = 0 if cos_sin is None else cos_sin.stride(0)
        self.arguments = RotationArguments(cos_sin, stride, q_weight, k_weight, eps, value_norm_eps)
        self.config = RotationConfig(size, None if sections is None else tuple(sections), norm_last)


_NO_ROTATION = Rotation()


@dataclass(frozen=True, slots=True)
class Projection:
    """Queries, keys and values of the newest tokens before norm and RoPE.

    Attributes:
        qkv: [T, (Hq + 2 * Hkv) * D], a row's newest token in each line: q's heads, then k's, then
            v's.
        rotation: of queries and keys.
        positions: int32 [T], or [3, T] with sections, where RoPE places the tokens; None: at their
            places in the sequences.
        key_shifts: float32 [Hkv, D], subtracted from keys that are written; None: nothing.
    """

    qkv: torch.Tensor
    rotation: Rotation = _NO_ROTATION
    positions: torch.Tensor | None = None
    key_shifts: torch.Tensor | None = None

    @property
    def axis_stride(self) -> int:
        """The distance between a token's positions in time, height and width."""
        return 0 if self.positions is None or self.positions.ndim == 1 else self.positions.stride(0)
