"""Shapes of Gemma 3n and 4 as they are published and as transformers has them, and what Gemma 4's
configuration may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.gemma4 import Gemma4Config, read_kv_sources
from aioinfer.models.registry import build_model, load_model_config
from tests.test_models import GEMMA4_31B, GEMMA4_EXPERTS
from tests.tiny_models import tiny_model

META = torch.device("meta")


def kinds(layers: int, every: int) -> list[str]:
    of_period = ["sliding_attention"] * (every - 1) + ["full_attention"]
    return (of_period * layers)[:layers]


_WITHOUT_INPUTS = {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": kinds(35, 5), "final_logit_softcapping": 30.0,
    },
    "E4B": {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18, "layer_types": kinds(42, 6),
    },
    "31B": {
        **_WITHOUT_INPUTS, "hidden_size": 5376, "intermediate_size": 21_504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "26B-A4B": {
        **_WITHOUT_INPUTS, "hidden_size": 2816, "intermediate_size": 2112,
        "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "3n E2B": {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10},
    "3n E4B": {},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str, tmp_path: Path) -> None:
    kind, model_class = Gemma4TextConfig, Gemma4ForCausalLM
    if name.startswith("3n"):
        kind, model_class = Gemma3nTextConfig, Gemma3nForCausalLM
    config: Any = kind(**PUBLISHED[name])
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    with META:
        theirs = model_class(config)
    model = build_model(tmp_path, Backend(META, torch.bfloat16, ParallelGroup.single()))
    assert isinstance(model, DecoderModel)
    ours = {tensor: sorted(shard.checkpoint_shape) for tensor, shard in model.weight_shards()}
    expected = {tensor: sorted(value.shape) for tensor, value in theirs.state_dict().items()}
    del expected["lm_head.weight"]  # tied
    assert ours == expected


def test_groups_of_two_head_sizes(tmp_path: Path) -> None:
    """Layers that read the cache of others are in no group."""
    folder = tiny_model("gemma4_text", tmp_path)
    model = build_model(folder, Backend(META, torch.float32, ParallelGroup.single()))
    groups = [(group.spec, group.layers) for group in group_layers(model.kv_specs)]
    assert groups == [(AttentionSpec(2, 16, 9), (0, 1)), (AttentionSpec(2, 32), (2,))]


def test_the_fields_of_published_files(tmp_path: Path) -> None:
    """transformers writes the shape of layers without a window by layer; published files have
    fields of their own for it."""
    folder = tiny_model("gemma4_text", tmp_path, **GEMMA4_31B)
    written = load_model_config(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 2}
    config["use_bidirectional_attention"] = "vision"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder) == written
    assert isinstance(written, Gemma4Config)
    assert (written.global_head_size, written.global_kv_heads, written.num_kv_heads) == (32, 2, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "only causal models"),
        ({"num_kv_shared_layers": 4}, "leaves layer 2 no earlier layer of its kind"),
        ({"num_kv_shared_layers": 9}, "leaves layer 0 no earlier layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be at least 0"),
        ({"global_head_dim": 3, "per_layer_config": None}, "heads of size 3"),
        ({"per_layer_config": {"2": {"head_dim": 8}, "4": {}}}, "all of its layers the same"),
        ({"per_layer_config": {"2": 3}}, "all of its layers the same"),
        (
            {**GEMMA4_EXPERTS, "num_experts": 2},
            "top_k_experts = 3 exceeds the 2 experts",
        ),
        ({"enable_moe_block": True}, "enable_moe_block needs num_experts, top_k_experts"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_model("gemma4_text", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder)


def test_layers_read_the_last_one_of_their_kind() -> None:
    windows = (9, None, 9, 9, None, 9, 9, None)
    assert read_kv_sources(windows, 0) == (None,) * 8
    assert read_kv_sources(windows, 4) == (None, None, None, None, 1, 3, 3, 1)
