"""Seed-OSS (ByteDance 2025): Llama's layers, with biases of queries, keys and values and heads that
are wider than the hidden size over their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aioinfer.models.llama import LlamaConfig, LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """Seed-OSS's configuration."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {"attention_bias": True, "head_dim": 128}

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the biases: the output's is a field of its own."""
        output_bias = bool(config.get("attention_out_bias", False))
        return {**LlamaConfig.own_fields(config), "output_bias": output_bias}


FAMILIES = {"SeedOssForCausalLM": (SeedOssConfig, LlamaModel)}
