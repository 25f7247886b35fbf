"""Checkpoints of gpt-oss in MXFP4, beside what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

#: As in OpenAI's checkpoints.
IGNORED = (
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
)  # fmt: skip


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the blocks, uint8 [experts, out, in / 32, 16], and scales, uint8 [experts, out, in /
    32], of weights [experts, in, out], rounded to nearest."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    values = torch.tensor(FP4_VALUES)
    codes = (torch.ldexp(groups, -exponents[..., None])[..., None] - values).abs().argmin(-1)
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def quantize_experts(
    folder: Path, out: Path, *, dense: Path | None = None, left_out: tuple[int, ...] = ()
) -> Path:
    """Writes a small gpt-oss of `folder` with the experts of all layers but `left_out` in MXFP4
    to `out`; to `dense`, with the weights that transformers reads there, in bfloat16. Returns
    `out`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    expanded = dict(tensors)
    for layer in set(range(config["num_hidden_layers"])) - set(left_out):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            blocks, scales = quantize(tensors.pop(name))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expanded[name] = convert_moe_packed_tensors(blocks, scales)
    others = [f"model.layers.{layer}.mlp.experts" for layer in left_out]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": [*IGNORED, *others]}
    _write(out, tensors, config | {"quantization_config": quantization})
    if dense is not None:
        _write(dense, expanded, config)
    return out


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
