"""Small random models of every supported family, made and saved by transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

#: As transformers names types of models.
FAMILIES = (
    "bamba", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "falcon",
    "falcon_h1", "gemma2", "gemma3", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe", "gpt2",
    "gpt_oss", "granite", "granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "kimi_linear", "lfm2", "lfm2_moe", "llama", "minimax_m2", "mistral", "mixtral",
    "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "seed_oss",
    "stablelm",
)  # fmt: skip
#: Those with layers that keep a state of a sequence beside keys, or instead of them.
STATE_FAMILIES = (
    "qwen3_next", "qwen3_5_text", "lfm2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "kimi_linear",
)  # fmt: skip
_MODEL_TYPES = {"gemma3": "gemma3_text"}
#: Fields of families whose defaults would leave what they are for without effect on small models.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
#: Fields of latent attention and experts that Kimi-Linear names otherwise.
_KIMI_OWN = ("head_dim", "n_routed_experts", "first_k_dense_replace")
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "head_dim": 16,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 12, "mamba_n_groups": 2,
}  # fmt: skip
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 96, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6, "attention_multiplier": 0.15, "logits_scaling": 4.0,
    },
    "falcon_h1": {
        **_MAMBA, "mamba_d_ssm": 128, "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.7, "key_multiplier": 0.6, "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.9, 1.3, 0.8, 1.5, 0.7],
        "mlp_multipliers": [1.5, 0.6], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4,
    },
    "kimi_linear": {
        **{name: value for name, value in _LATENT.items() if name not in _KIMI_OWN},
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 8, "linear_head_dim": 12, "num_local_experts": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"],
        "mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 4,
    },
    "qwen3_next": {**_DELTA_NET, **_QWEN_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_QWEN_EXPERTS},
    "cohere2": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
    },
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "head_dim": 8},
    "falcon": {
        "head_dim": 8, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96,
    },
    "gpt2": {"n_inner": 96, "initializer_range": 0.4, "head_dim": 8, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "olmo3": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
    },
    "opt": {"ffn_dim": 96, "head_dim": 8, "num_key_value_heads": 8, "init_std": 0.2},
    "phi": {"head_dim": 8},
    "stablelm": {"head_dim": 8},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "deepseek_v3": {
        **_LATENT, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
    },
    "gemma2": {
        "query_pre_attn_scalar": 24, "sliding_window": 9, "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "query_pre_attn_scalar": 24, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2, "sliding_window": 9, "hidden_size_per_layer_input": 12,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.5, 0.0],
        "final_logit_softcapping": 10.0,
    },
    # the last two layers read the keys and values of the two before them
    "gemma4_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2, "sliding_window": 9, "global_head_dim": 32,
        "hidden_size_per_layer_input": 12, "use_double_wide_mlp": True,
        "final_logit_softcapping": 10.0,
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.15,
        "logits_scaling": 4.0,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        # older versions of transformers always compute with 7
        "swiglu_limit": getattr(CONFIG_MAPPING["gpt_oss"](), "swiglu_limit", None) and 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16, "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "layer_types": ["full_attention", "conv"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    # embeddings as large as what the layers add, which is normed
    "olmo2": {"initializer_range": 1.0},
}  # fmt: skip
#: Families whose norms store their weights less one.
_UNIT_OFFSET = ("gemma2", "gemma3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def tiny_model(
    family: str,
    folder: Path,
    *,
    vocab_size: int = 512,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Saves a random model into `folder` and returns it.

    Two layers, 8 heads over 2 KV heads of 16 channels, so that 1, 2, 4 and 8 ranks divide it.
    Weights have a larger deviation than for training, so that greedy texts are varied. `fields`
    replace those of the configuration.
    """
    given: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
        "initializer_range": 0.2, "tie_word_embeddings": False, **_FIELDS.get(family, {}), **fields,
    }  # fmt: skip
    if family in ("gemma3n_text", "gemma4_text"):
        given.setdefault("vocab_size_per_layer_input", vocab_size)
    if family in ("falcon", "kimi_linear"):  # which compute it
        del given["head_dim"]
    config = CONFIG_MAPPING[_MODEL_TYPES.get(family, family)](**given)
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype)
    randomize(model, offset=1.0 if family in _UNIT_OFFSET else 0.0)
    model.save_pretrained(folder)
    if family == "kimi_linear":
        _rename_dense_mlps(folder / "model.safetensors")
    return folder


def _rename_dense_mlps(file: Path) -> None:
    """Gives MLPs in the place of experts the names of published checkpoints; transformers, which
    reads these, writes other ones."""
    tensors = load_file(file)
    pattern = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    save_file({pattern.sub("mlp", name): tensors[name] for name in tensors}, file, {"format": "pt"})


def randomize(model: Any, offset: float = 0.0) -> None:
    """Makes the biases and norms of a model of transformers random: zeros and ones would hide that
    they are left out. `offset`: norms store their weights less this."""
    for name, parameter in model.named_parameters():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.uniform_(parameter, -0.2, 0.2)
        elif name.endswith(("bias", "sinks")):
            bound = 3.0 if name.endswith("sinks") else 0.5
            torch.nn.init.uniform_(parameter, -bound, bound)
        elif "norm" in name or ".ln_" in name:
            torch.nn.init.uniform_(parameter, 0.5 - offset, 1.5 - offset)
        elif name.endswith(("router.scale", "per_expert_scale", "correct_output_scale")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.uniform_(buffer, -0.2, 0.2)
