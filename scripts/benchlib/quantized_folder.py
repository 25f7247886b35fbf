"""Writes a copy of a model folder with its weights in a quantized format, by plain rounding:
without calibration, so the loss of accuracy is the format's own.

The layouts are the published ones of AutoGPTQ and GPTQModel, AutoAWQ and compressed-tensors. Used
by `perplexity.py` and by tests.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

#: The linear layers of decoders: all but the head.
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(experts\.\d+\.)?\w+_proj\.weight")
#: The column that each four bits of a word hold, the lowest first, in AutoAWQ's layout.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which numbers share a scale, and how they are stored.

    Attributes:
        bits: 4 or 8.
        size: inputs of a group, or None for whole rows.
        is_symmetric: no zero points.
        seed: of a random order of the inputs, as `desc_act` makes one of activations; None for
            the given order.
    """

    bits: int = 4
    size: int | None = 128
    is_symmetric: bool = True
    seed: int | None = None

    def group_of(self, inputs: int) -> torch.Tensor:
        """Returns the group of each input, int32."""
        group_of = torch.arange(inputs, dtype=torch.int32) // (self.size or inputs)
        if self.seed is None:
            return group_of
        generator = torch.Generator().manual_seed(self.seed)
        return group_of[torch.randperm(inputs, generator=generator)]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight [out, in] as (integers - zeros) * scales.

    Attributes:
        integers: int32 [out, in], from 0 on.
        scales, zeros: float16 and int32, [out, groups].
        group_of: int32 [in].
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_of: torch.Tensor


def round_to_groups(weight: torch.Tensor, groups: Groups) -> Rounded:
    """Rounds a weight [out, in] to the nearest integers that its groups' extremes give scales for,
    as AutoGPTQ's quantizer does without its search."""
    weight, group_of = weight.float(), groups.group_of(weight.shape[1])
    largest = 2**groups.bits - 1
    count = int(group_of.max()) + 1
    index = group_of.long().expand_as(weight)
    ends = torch.zeros(2, len(weight), count)
    ends[0].scatter_reduce_(1, index, weight, "amin")
    ends[1].scatter_reduce_(1, index, weight, "amax")
    low, high = ends
    if groups.is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / largest).clamp_(min=1e-5).half()
    zeros = torch.full_like(low, (largest + 1) / 2)
    if not groups.is_symmetric:
        zeros = (-low / scales.float()).round_().clamp_(0, largest)
    scaled = weight / scales.float()[:, group_of] + zeros[:, group_of]
    return Rounded(scaled.round_().clamp_(0, largest).int(), scales, zeros.int(), group_of)


def pack(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Packs integers [., .] into int32 along a dimension, the first into the lowest bits; missing
    ones at the end are 0."""
    values = values.movedim(dim, -1).long()
    count = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    shifted = values.unflatten(-1, (-1, count)) << torch.arange(0, 32, bits)
    words = shifted.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def gptq_tensors(weight: torch.Tensor, groups: Groups, *, is_v2: bool = False) -> Tensors:
    """AutoGPTQ's tensors of a weight [out, in]; v2: GPTQModel's, whose zero points are as they
    are."""
    rounded, largest = round_to_groups(weight, groups), 2**groups.bits - 1
    zeros = rounded.zeros if is_v2 else (rounded.zeros - 1) & largest
    return {
        "qweight": pack(rounded.integers.t(), groups.bits, 0),
        "qzeros": pack(zeros.t(), groups.bits, 1),
        "scales": rounded.scales.t().contiguous(),
        "g_idx": rounded.group_of,
    }


def awq_tensors(weight: torch.Tensor, groups: Groups) -> Tensors:
    """AutoAWQ's tensors of a weight [out, in]: packed along the outputs, in an order of their
    own."""
    rounded, order = round_to_groups(weight, groups), torch.tensor(AWQ_COLUMNS)

    def packed(values: torch.Tensor) -> torch.Tensor:
        return pack(values.t().unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

    return {
        "qweight": packed(rounded.integers),
        "qzeros": packed(rounded.zeros),
        "scales": rounded.scales.t().contiguous(),
    }


def packed_tensors(weight: torch.Tensor, groups: Groups) -> Tensors:
    """compressed-tensors' pack-quantized tensors of a weight [out, in]: signed integers and zero
    points, stored larger by 2 ** (bits - 1)."""
    rounded = round_to_groups(weight, groups)
    tensors = {
        "weight_packed": pack(rounded.integers, groups.bits, 1),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not groups.is_symmetric:
        tensors["weight_zero_point"] = pack(rounded.zeros, groups.bits, 0)
    if groups.seed is not None:
        tensors["weight_g_idx"] = rounded.group_of
    return tensors


def scaled_tensors(weight: torch.Tensor, kind: str, block: int | None = None) -> Tensors:
    """compressed-tensors' tensors of one-byte weights: a scale for each row, or for each block."""
    weight = weight.float()
    largest = 127.0 if kind == "int8" else 448.0
    if block is None:
        scales = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / largest
        spread = scales
    else:
        rows, columns = (-(-size // block) for size in weight.shape)
        bottom, right = rows * block - len(weight), columns * block - weight.shape[1]
        padded = torch.nn.functional.pad(weight.abs(), (0, right, 0, bottom))
        scales = padded.view(rows, block, columns, block).amax((1, 3)).clamp_(min=1e-12) / largest
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[: len(weight), : weight.shape[1]]
    values = weight / spread
    if kind == "int8":
        return {"weight": values.round_().to(torch.int8), "weight_scale": scales}
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scales}


@dataclass(frozen=True, slots=True)
class Format:
    """A format of checkpoints.

    Attributes:
        tensors: returns the tensors of a linear layer by the ends of their names.
        config: `quantization_config`.
    """

    tensors: Callable[[torch.Tensor], Tensors]
    config: Mapping[str, Any]


def gptq(groups: Groups = Groups(), *, is_v2: bool = False) -> Format:
    """Returns the format of AutoGPTQ or GPTQModel."""
    config = {
        "quant_method": "gptq",
        "bits": groups.bits,
        "group_size": groups.size or -1,
        "sym": groups.is_symmetric,
        "desc_act": groups.seed is not None,
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq",
    }
    return Format(partial(gptq_tensors, groups=groups, is_v2=is_v2), config)


def awq(size: int | None = 128) -> Format:
    """Returns the format of AutoAWQ."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size or -1,
        "zero_point": True,
        "version": "gemm",
    }
    return Format(partial(awq_tensors, groups=Groups(size=size, is_symmetric=False)), config)


def packed(groups: Groups = Groups()) -> Format:
    """Returns compressed-tensors' format pack-quantized."""
    weights = {
        "num_bits": groups.bits,
        "type": "int",
        "symmetric": groups.is_symmetric,
        "strategy": "channel" if groups.size is None else "group",
        "group_size": groups.size,
        "actorder": None if groups.seed is None else "group",
    }
    return Format(partial(packed_tensors, groups=groups), _compressed("pack-quantized", weights))


def scaled(kind: str, block: int | None = None) -> Format:
    """Returns compressed-tensors' format float-quantized or int-quantized, with activations
    quantized by token (in blocks, by token and block)."""
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "int" if kind == "int8" else "float",
        "symmetric": True,
        "strategy": "channel" if block is None else "block",
    }
    activations = weights | {"strategy": "token", "dynamic": True}
    if block is not None:
        weights["block_structure"] = [block, block]
        activations |= {"strategy": "group", "group_size": block}
    name = "int-quantized" if kind == "int8" else "float-quantized"
    return Format(
        partial(scaled_tensors, kind=kind, block=block), _compressed(name, weights, activations)
    )


def _compressed(
    name: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


#: By the names that `perplexity.py` has for them. Groups are of 128.
FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq-asym": gptq(Groups(is_symmetric=False)),
    "gptq-v2": gptq(Groups(is_symmetric=False), is_v2=True),
    "gptq-order": gptq(Groups(seed=1)),
    "gptq-8bit": gptq(Groups(bits=8)),
    "awq": awq(),
    "packed": packed(),
    "packed-asym": packed(Groups(is_symmetric=False)),
    "packed-8bit": packed(Groups(bits=8)),
    "packed-rows": packed(Groups(size=None)),
    "fp8": scaled("fp8"),
    "fp8-blocks": scaled("fp8", 128),
    "int8": scaled("int8"),
}


def quantize_folder(
    folder: Path, out: Path, scheme: str | Format, linear: re.Pattern[str] = _LINEAR
) -> Path:
    """Writes a quantized copy of a model folder and returns it.

    Args:
        folder: with safetensors files in 16 or 32 bits.
        out: is made; weights go into one file of it, all other files are copied.
        scheme: of `FORMATS`, or another.
        linear: matches the names of the weights that are quantized.
    """
    format = FORMATS[scheme] if isinstance(scheme, str) else scheme
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, out)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = dict(format.config)
    (out / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    tensors: Tensors = {}
    for name, tensor in _tensors_of(folder):
        if not linear.fullmatch(name):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        made = format.tensors(tensor)
        tensors |= {f"{module}.{end}": part.contiguous() for end, part in made.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                yield name, tensors.get_tensor(name)
