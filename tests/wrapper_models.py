"""Small random models of text and other parts, made and saved by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import randomize

VOCAB = 211
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_DEEP_TOWER = {
    "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "num_heads": 2
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 8, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "model_type": "deepseek_v3",
}  # fmt: skip


def _rope(*section: int, **others: float) -> dict[str, Any]:
    """Returns M-RoPE with these sections."""
    parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(section)}
    return {"rope_parameters": {**parameters, **others}}


_GEMMA = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
    "num_kv_shared_layers": 2, "sliding_window": 9, "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0,
}  # fmt: skip
_AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32,
    "subsampling_conv_channels": [8, 4],
}  # fmt: skip
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    **_rope(1, 1, 2, partial_rotary_factor=0.5),
}  # fmt: skip
#: Of each wrapper: the name of its class, and the fields of its text model, tower and own.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "sliding_window": 9, "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        _TOWER, {"mm_tokens_per_image": 4},
    ),
    "gemma3n": (
        "Gemma3nForConditionalGeneration",
        {**_GEMMA, "laurel_rank": 8, "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.5, 0.0]},
        {"hidden_size": 32},
        {"audio_config": {"hidden_size": 32}},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {**_GEMMA, "global_head_dim": 32, "use_double_wide_mlp": True},
        {**_TOWER, "head_dim": 16}, {"audio_config": _AUDIO},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"head_dim": 8, **_rope(1, 1, 2)},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"head_dim": 8, **_rope(1, 1, 2)},
        _DEEP_TOWER, {"tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration", _rope(2, 3, 3),
        {**_DEEP_TOWER, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, **_rope(2, 3, 3)},
        {**_DEEP_TOWER, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _DELTA_NET, _DEEP_TOWER, {}),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            **_DELTA_NET, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
        _DEEP_TOWER, {},
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"head_dim": None, **_rope(1, 1, partial_rotary_factor=0.5)},
        _DEEP_TOWER, {},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {**_EXPERTS, **_rope(1, 1, 2, partial_rotary_factor=0.5)},
        _DEEP_TOWER, {},
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration", {**_EXPERTS, **_LATENT}, {**_TOWER},
        {"projection_hidden_size": 32, "tie_word_embeddings": False},
    ),
    "llava": (
        "LlavaForConditionalGeneration", {"model_type": "llama"},
        {**_TOWER, "model_type": "clip_vision_model"},
        {},
    ),
}  # fmt: skip


def save_wrapper(name: str, folder: Path) -> Any:
    """Saves a model with random weights in float32. Returns the model of transformers."""
    class_name, text, tower, own = WRAPPERS[name]
    model_class = getattr(transformers, class_name)
    fields = {key: value for key, value in {**_TEXT, **text}.items() if key != "head_dim" or value}
    config = model_class.config_class(text_config=fields, vision_config=tower, **own)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with _without_towers() if name == "gemma3n" else nullcontext():
        model = model_class(config).eval()
    randomize(model, offset=1.0 if name in ("gemma3", "qwen3_5", "qwen3_5_moe") else 0.0)
    model.save_pretrained(folder)
    if name == "kimi_k25":  # transformers reads published names, and writes others
        rename(folder, lambda tensor: tensor.replace("model.blocks.", "model.layers."))
    return model


def _without_towers() -> Any:
    """Context in which Gemma 3n's towers, which take the package timm, are a matrix each."""
    make = transformers.AutoModel.from_config

    def make_text(config: Any) -> Any:
        is_text = config.model_type == "gemma3n_text"
        return make(config) if is_text else torch.nn.Linear(2, 3)

    return patch("transformers.models.gemma3n.modeling_gemma3n.AutoModel.from_config", make_text)


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    """Renames the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {new_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the decoded `config.json`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
