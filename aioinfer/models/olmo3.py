"""OLMo 3 (Team OLMo 2025): OLMo 2 with a window in three of four layers; RoPE is stretched in the
others alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.layers.rotary import RopeConfig
from aioinfer.models.config import DecoderConfig, read_ropes, read_windows
from aioinfer.models.olmo2 import Olmo2Config, Olmo2Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """OLMo 3's configuration. `local_rope`: of layers with a window."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Olmo2Config.DEFAULTS, "sliding_window": 4096}

    local_rope: RopeConfig

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the windows and both ropes, whose factor is in `max_position_embeddings`
        already."""
        theta = config.get("rope_theta") or 500_000.0
        rope, local_rope = read_ropes(config, theta, theta)
        return {
            **Olmo2Config.own_fields(config),
            "windows": read_windows(config, full_every=4),
            "rope": rope,
            "local_rope": local_rope,
            "max_len": config["max_position_embeddings"],
        }

    def attention_shape(self, number: int) -> dict[str, Any]:
        """Layers with a window have a RoPE of their own."""
        shape = DecoderConfig.attention_shape(self, number)
        return shape if self.windows[number] is None else {**shape, "rope": self.local_rope}


FAMILIES = {"Olmo3ForCausalLM": (Olmo3Config, Olmo2Model)}
