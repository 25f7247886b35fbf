"""The text models of Gemma 3 (Gemma Team 2025): Gemma 2 with queries and keys normed by head
instead of soft caps, and with RoPE of a shorter base in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.models.config import read_ropes
from aioinfer.models.gemma2 import Gemma2Config, Gemma2Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """Gemma 3's configuration: one layer of six has no window."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Gemma2Config.DEFAULTS,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads both ropes. The factor of `rope_scaling` is in `max_position_embeddings`
        already."""
        theta = config.get("rope_theta") or 1_000_000.0
        rope, local_rope = read_ropes(config, theta, config.get("rope_local_base_freq") or 10_000.0)
        return {
            **Gemma2Config.own_fields({**config, "rope_parameters": None}),
            "rope": rope,
            "local_rope": local_rope,
            "max_len": config["max_position_embeddings"],
            "head_norms": True,
        }


class Gemma3Model(Gemma2Model):
    """Gemma 2's layers; all differences are in the configuration."""


FAMILIES = {"Gemma3ForCausalLM": (Gemma3Config, Gemma3Model)}
