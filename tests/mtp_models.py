"""Tiny models with a head that predicts further tokens, and what transformers computes of it: a
model of the family with one layer, given the projected embeddings and hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_model


class Layout(NamedTuple):
    """Where a family's checkpoints have the head.

    Attributes:
        family: as in `tiny_model`.
        layer: the prefix of the layer's modules.
        embedding_norm, hidden_norm, projection, norm: modules.
        fields: of the head's model of one layer.
        is_hidden_first: see `MtpNames`.
        unit_offset: whether norms store their weights less one.
        config: fields of the configuration that name the head.
    """

    family: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    fields: dict[str, Any]
    is_hidden_first: bool = False
    unit_offset: bool = False
    config: dict[str, Any] = {"num_nextn_predict_layers": 1}  # noqa: RUF012 - not written to


_QWEN = Layout(
    "qwen3_next", "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
    "mtp.norm", {"layer_types": ["full_attention"]}, unit_offset=True,
    config={"mtp_num_hidden_layers": 1},
)  # fmt: skip
_BEHIND = Layout(
    "deepseek_v3", "model.layers.2", "model.layers.2.enorm", "model.layers.2.hnorm",
    "model.layers.2.eh_proj", "model.layers.2.shared_head.norm", {"first_k_dense_replace": 0},
)  # fmt: skip
_MIMO = "model.mtp_layers.0"
LAYOUTS = {
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN._replace(family="qwen3_5_text"),
    "qwen3_5_moe": _QWEN._replace(family="qwen3_5_moe_text"),
    "deepseek_v3": _BEHIND,
    "glm4_moe": _BEHIND._replace(family="glm4_moe"),
    "mimo": Layout(
        "qwen2", _MIMO, f"{_MIMO}.token_layernorm", f"{_MIMO}.hidden_layernorm",
        f"{_MIMO}.input_proj", f"{_MIMO}.final_layernorm", {}, is_hidden_first=True,
        config={"num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]},
    ),
}  # fmt: skip


class MtpReference:
    """The head, as transformers computes its layer."""

    def __init__(self, layout: Layout, folder: Path, head: Path):
        self._layout, self._tensors = layout, load_file(folder / "model.safetensors")
        self._layer = AutoModelForCausalLM.from_pretrained(
            head, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"] + self._layout.unit_offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns the output [T, hidden_size] for a whole text; see `MtpHead`."""
        layout = self._layout
        both = [self._norm(layout.embedding_norm, embedded), self._norm(layout.hidden_norm, hidden)]
        joined = torch.cat(both[::-1] if layout.is_hidden_first else both, dim=1)
        projected = joined @ self._tensors[f"{layout.projection}.weight"].T
        return self._layer.model(inputs_embeds=projected[None]).last_hidden_state[0]


def mtp_model(name: str, folder: Path, **fields: Any) -> tuple[Path, MtpReference]:
    """Saves a random model with a head into `folder`; returns it and the reference of the head.
    `fields` as in `tiny_model`."""
    layout = LAYOUTS[name]
    fields = {"rms_norm_eps": 1e-6, **fields}
    tiny_model(layout.family, folder, **fields)
    one_layer = {"num_hidden_layers": 1, "seed": 7, **fields, **layout.fields}
    head = tiny_model(layout.family, folder / "head", **one_layer)
    tensors = load_file(folder / "model.safetensors")
    for stored, tensor in load_file(head / "model.safetensors").items():
        if stored.startswith("model.layers.0."):
            tensors[f"{layout.layer}.{stored.removeprefix('model.layers.0.')}"] = tensor
        elif stored == "model.norm.weight":
            tensors[f"{layout.norm}.weight"] = tensor
    size = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(3)
    for norm in (layout.embedding_norm, layout.hidden_norm):
        weight = torch.empty(size).uniform_(0.5, 1.5, generator=generator)
        tensors[f"{norm}.weight"] = weight - float(layout.unit_offset)
    projection = torch.empty(size, 2 * size).normal_(0.0, 0.2, generator=generator)
    tensors[f"{layout.projection}.weight"] = projection
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8")) | layout.config
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder, MtpReference(layout, folder, head)
