"""Checkpoints of weights of one byte, written as the field's quantizers publish them, beside their
dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8, INT8 = torch.float8_e4m3fn, torch.int8
#: Projections of all layers.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
           "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
           "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj", "out_proj",
           "w1", "w2", "w3", "input_linear", "output_linear")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How weights are quantized and stored.

    Attributes:
        dtype: of the values.
        config: `quantization_config`.
        block: output and input features that share a scale; None for a scale per output feature,
            or per tensor with `is_whole`.
        scales: the name of the scales.
        is_whole: one scale for a tensor; stored as a scalar.
        is_static: the checkpoint has scales of the activations.
    """

    dtype: torch.dtype
    config: dict[str, Any]
    block: tuple[int, int] | None = None
    scales: str = "weight_scale"
    is_whole: bool = False
    is_static: bool = False


def compressed(
    kind: str, strategy: str, activations: dict[str, Any] | None, **weights: Any
) -> dict[str, Any]:
    """Returns a `quantization_config` of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "type": kind, "num_bits": 8, "strategy": strategy, "symmetric": True, "dynamic": False,
            **weights,
        },
        "input_activations": activations,
        "output_activations": None,
    }  # fmt: skip
    name = {"float": "float-quantized", "int": "int-quantized"}[kind]
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def token(kind: str, *, dynamic: bool = True) -> dict[str, Any]:
    strategy = "token" if dynamic else "tensor"
    return {
        "type": kind, "num_bits": 8, "symmetric": True, "dynamic": dynamic, "strategy": strategy,
    }  # fmt: skip


def layouts(block: tuple[int, int]) -> dict[str, Layout]:
    """Returns every layout that is read, with blocks of a size, by a name for people."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    groups = {**token("float"), "strategy": "group", "group_size": block[1]}
    by_block = compressed("float", "block", groups, block_structure=list(block))
    static = compressed("float", "tensor", token("float", dynamic=False))
    return {
        "float channel": Layout(FP8, compressed("float", "channel", token("float"))),
        "float tensor": Layout(
            FP8, compressed("float", "tensor", token("float")), is_whole=True
        ),
        "float static": Layout(FP8, static, is_whole=True, is_static=True),
        "float weights alone": Layout(FP8, compressed("float", "channel", None)),
        "float block": Layout(FP8, by_block, block),
        "int channel": Layout(INT8, compressed("int", "channel", token("int"))),
        "int tensor": Layout(INT8, compressed("int", "tensor", token("int")), is_whole=True),
        "fp8": Layout(FP8, fp8, is_whole=True),
        "fp8 static": Layout(
            FP8, {**fp8, "activation_scheme": "static"}, is_whole=True, is_static=True
        ),
        "fp8 block": Layout(
            FP8, {**fp8, "weight_block_size": list(block)}, block, scales="weight_scale_inv"
        ),
    }  # fmt: skip


def write(folder: Path, layout: Layout, skipped: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Quantizes the linear layers of a model folder in place.

    Args:
        skipped: ends of the names of modules that are left as they are.

    Returns:
        All tensors by name, the quantized ones dequantized (float32).
    """
    tensors = load_file(folder / "model.safetensors")
    written, dequantized = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or not module.endswith(LINEARS) or module.endswith(tuple(skipped)):
            written[name] = dequantized[name] = tensor
            continue
        values, scales, wide = quantized(tensor.float(), layout)
        written |= {name: values, f"{module}.{layout.scales}": scales}
        dequantized[name] = wide
        if layout.is_static:
            written[f"{module}.input_scale"] = torch.tensor(0.2 + 0.1 * torch.rand(()).item())
    save_file(written, folder / "model.safetensors")
    set_config(folder, quantization_config=layout.config)
    return dequantized


def quantized(
    weight: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the values, the scales as they are stored, and the dequantized weight."""
    rows, columns = weight.shape
    height, width = layout.block or ((rows, columns) if layout.is_whole else (1, columns))
    maximum = 448.0 if layout.dtype == FP8 else 127.0
    values, dequantized = torch.empty(rows, columns, dtype=layout.dtype), torch.empty_like(weight)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    for i, top in enumerate(range(0, rows, height)):
        for j, left in enumerate(range(0, columns, width)):
            place = slice(top, top + height), slice(left, left + width)
            scales[i, j] = weight[place].abs().max() / maximum
            part = weight[place] / scales[i, j]
            values[place] = (part.round() if layout.dtype == INT8 else part).to(layout.dtype)
            dequantized[place] = values[place].float() * scales[i, j]
    return values, scales.reshape(()) if layout.is_whole else scales, dequantized


def write_dequantized(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the weights of a model folder, which is not quantized any more."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    set_config(folder, quantization_config=None)


def set_config(folder: Path, **fields: Any) -> None:
    """Sets fields of `config.json`; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
