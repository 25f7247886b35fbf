"""InternVL 3 and 3.5 in the layout that they were first published in, which their own code reads:
the fields of its `config.json`, the names of its tensors, and a chat template for texts alone. All
else is `internvl`'s. The names are those of transformers' script that converts such checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from aioinfer.errors import ConfigError
from aioinfer.layers.shards import NamedShards, WeightShard
from aioinfer.models.vision.internvl import InternVLFormat, InternVLTower

#: Parts of the names of the tower's parameters, and of the checkpoint's tensors.
_NAMES = {
    "vision_tower.": "vision_model.", ".encoder.layer.": ".encoder.layers.",
    ".cls_token": ".class_embedding", ".position_embeddings": ".position_embedding",
    ".patch_embeddings.projection.": ".patch_embedding.", ".lambda_1": ".ls1", ".lambda_2": ".ls2",
    ".attention.projection_layer.": ".attn.proj.", ".attention.": ".attn.",
    ".layernorm_before.": ".norm1.", ".layernorm_after.": ".norm2.",
    "multi_modal_projector.layer_norm.": "mlp1.0.", "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}  # fmt: skip
_QKV = re.compile(r"\.([qkv])_proj\.")


def _as_internvl(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a decoded `config.json` as transformers would write it. Raises `ConfigError` for a
    model that reads pictures otherwise."""
    vision = dict(config["vision_config"])
    for name, given, known in (
        ("force_image_size", config.get("force_image_size"), (None, vision.get("image_size"))),
        ("ps_version", config.get("ps_version"), ("v2",)),
        ("dynamic_image_size", config.get("dynamic_image_size"), (True,)),
        ("use_thumbnail", config.get("use_thumbnail"), (True,)),
        ("pad2square", config.get("pad2square", False), (False,)),
    ):
        if given not in known:
            raise ConfigError(f"{name} must be {known[-1]!r}")
    vision["attention_bias"] = vision.get("qkv_bias", True)
    vision["use_qk_norm"] = vision.get("qk_normalization", False)
    return {**config, "vision_config": vision, "vision_feature_layer": config["select_layer"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat(InternVLFormat):
    """See the module."""

    behind: ClassVar[str | None] = "\n"

    @classmethod
    def read(cls, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> Self:
        """See `InternVLFormat.read`: the processor's configuration is that of CLIP, which knows no
        tiles."""
        side = config["vision_config"]["image_size"]
        known = {
            **processor,
            "size": {"height": side, "width": side},
            "min_patches": config.get("min_dynamic_patch", 1),
            "max_patches": config.get("max_dynamic_patch", 12),
        }
        # not super(), which `slots` would leave with the class before
        return super(ChatFormat, cls).read(_as_internvl(config), known, max_pixels)


class ChatTower(InternVLTower):
    """See the module."""

    def __init__(self, config: Mapping[str, Any], format: InternVLFormat, hidden_size: int):
        super().__init__(_as_internvl(config), format, hidden_size)

    def weight_shards(self) -> NamedShards:
        """See `ReplicatedModule.weight_shards`: queries, keys and values are one tensor."""
        for name, shard in super().weight_shards():
            yield self._stored(name, shard)

    def _stored(self, name: str, shard: WeightShard) -> tuple[str, WeightShard]:
        for ours, stored in _NAMES.items():
            name = name.replace(ours, stored)
        if found := _QKV.search(name):
            size = len(shard.destination)
            shard = replace(shard, start="qkv".index(found[1]) * size, total=3 * size)
            name = _QKV.sub(".qkv.", name)
        return name, shard
