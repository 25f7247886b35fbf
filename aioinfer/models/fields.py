"""Checks the values of `config.json` before a family reads them.

A family's file reads fields by name, and computes with them. What it may rely on is declared here
once for all families: the type and the bounds of every field that any of them reads. Fields that no
family reads are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from aioinfer.errors import ConfigError

_INT32_MAX = 2**31 - 1
#: Far beyond any published model; each layer costs memory before its weights are looked for.
_MAX_LAYERS = 4096
_MAX_HEADS = 2**16
_MAX_EXPERTS = 2**16


class _Number(NamedTuple):
    """The bounds of a number, `minimum` among the values unless it `is_open`."""

    minimum: float
    maximum: float = math.inf
    is_open: bool = False


#: Whole numbers.
_COUNTS = {
    "vocab_size": _Number(1, _INT32_MAX),
    "hidden_size": _Number(1, _INT32_MAX),
    "intermediate_size": _Number(1, _INT32_MAX),
    "num_hidden_layers": _Number(1, _MAX_LAYERS),
    "num_attention_heads": _Number(1, _MAX_HEADS),
    "num_key_value_heads": _Number(1, _MAX_HEADS),
    "head_dim": _Number(2, _MAX_HEADS),
    "max_position_embeddings": _Number(1, _INT32_MAX),
    "original_max_position_embeddings": _Number(1, _INT32_MAX),
    "sliding_window": _Number(0, _INT32_MAX),
    "sliding_window_pattern": _Number(1, _INT32_MAX),
    "max_window_layers": _Number(0, _INT32_MAX),
    "num_experts": _Number(1, _MAX_EXPERTS),
    "num_local_experts": _Number(1, _MAX_EXPERTS),
    "n_routed_experts": _Number(1, _MAX_EXPERTS),
    "num_experts_per_tok": _Number(1, _MAX_EXPERTS),
    "n_group": _Number(1, _MAX_EXPERTS),
    "topk_group": _Number(1, _MAX_EXPERTS),
    "num_nextn_predict_layers": _Number(0, _MAX_LAYERS),
    "n_shared_experts": _Number(0, _MAX_EXPERTS),
    "moe_layer_start_index": _Number(0, _MAX_LAYERS),
    "moe_layer_end_index": _Number(-1, _MAX_LAYERS),
    "moe_layer_interval": _Number(1, _MAX_LAYERS),
    "num_ln_in_parallel_attn": _Number(1, 2),
    "word_embed_proj_dim": _Number(1, _INT32_MAX),
    "rotary_dim": _Number(2, _MAX_HEADS),
    "moe_intermediate_size": _Number(1, _INT32_MAX),
    "shared_expert_intermediate_size": _Number(0, _INT32_MAX),
    "decoder_sparse_step": _Number(1, _MAX_LAYERS),
    "first_k_dense_replace": _Number(0, _MAX_LAYERS),
    "moe_layer_freq": _Number(1, _MAX_LAYERS),
    "kv_lora_rank": _Number(1, _INT32_MAX),
    "q_lora_rank": _Number(1, _INT32_MAX),
    "qk_nope_head_dim": _Number(1, _MAX_HEADS),
    "qk_rope_head_dim": _Number(2, _MAX_HEADS),
    "v_head_dim": _Number(1, _MAX_HEADS),
    "linear_num_key_heads": _Number(1, _MAX_HEADS),
    "linear_num_value_heads": _Number(1, _MAX_HEADS),
    "linear_key_head_dim": _Number(1, _MAX_HEADS),
    "linear_value_head_dim": _Number(1, _MAX_HEADS),
    "linear_conv_kernel_dim": _Number(2, _MAX_HEADS),
    "mamba_num_heads": _Number(1, _MAX_HEADS),
    "mamba_head_dim": _Number(1, _MAX_HEADS),
    "ssm_state_size": _Number(1, _MAX_HEADS),
    "n_groups": _Number(1, _MAX_HEADS),
    "conv_kernel": _Number(2, _MAX_HEADS),
    "mamba_n_heads": _Number(1, _MAX_HEADS),
    "mamba_n_groups": _Number(1, _MAX_HEADS),
    "mamba_d_state": _Number(1, _MAX_HEADS),
    "mamba_d_conv": _Number(2, _MAX_HEADS),
    "mamba_d_ssm": _Number(1, _INT32_MAX),
    "moe_latent_size": _Number(1, _INT32_MAX),
    "moe_shared_expert_intermediate_size": _Number(1, _INT32_MAX),
    "linear_num_heads": _Number(1, _MAX_HEADS),
    "linear_head_dim": _Number(1, _MAX_HEADS),
    "mamba_expand": _Number(1, _INT32_MAX),
    "shared_intermediate_size": _Number(1, _INT32_MAX),
    "conv_L_cache": _Number(2, _MAX_HEADS),
    "block_multiple_of": _Number(1, _INT32_MAX),
    "num_dense_layers": _Number(0, _MAX_LAYERS),
    "full_attention_interval": _Number(1, _MAX_LAYERS),
    "global_head_dim": _Number(2, _MAX_HEADS),
    "num_global_key_value_heads": _Number(1, _MAX_HEADS),
    "num_kv_shared_layers": _Number(0, _MAX_LAYERS),
    "hidden_size_per_layer_input": _Number(0, _INT32_MAX),
    "vocab_size_per_layer_input": _Number(1, _INT32_MAX),
    "top_k_experts": _Number(1, _MAX_EXPERTS),
    "laurel_rank": _Number(1, _INT32_MAX),
    "num_layers": _Number(1, _MAX_LAYERS),
    "relative_attention_num_buckets": _Number(4, 2**16),
    "relative_attention_max_distance": _Number(3, _INT32_MAX),
    "encoder_layers": _Number(1, _MAX_LAYERS),
    "encoder_attention_heads": _Number(1, _MAX_HEADS),
    "encoder_ffn_dim": _Number(1, _INT32_MAX),
    "max_source_positions": _Number(1, 2**20),
    "num_mel_bins": _Number(1, 1024),
    "altup_num_inputs": _Number(1, 64),
    "altup_active_idx": _Number(0, 63),
}
_FLOATS = {
    "rms_norm_eps": _Number(0, 1),
    "layer_norm_eps": _Number(0, 1),
    "time_step_min": _Number(0),
    "block_ffn_dim_multiplier": _Number(0, is_open=True),
    "logit_scale": _Number(-math.inf),
    "rope_theta": _Number(1, is_open=True),
    "rope_local_base_freq": _Number(1, is_open=True),
    "partial_rotary_factor": _Number(0, 1, is_open=True),
    "query_pre_attn_scalar": _Number(0, is_open=True),
    "attn_logit_softcapping": _Number(0),
    "final_logit_softcapping": _Number(0),
    "embedding_multiplier": _Number(-math.inf),
    "residual_multiplier": _Number(-math.inf),
    "attention_multiplier": _Number(-math.inf),
    "logits_scaling": _Number(0, is_open=True),
    "attention_in_multiplier": _Number(-math.inf),
    "attention_out_multiplier": _Number(-math.inf),
    "key_multiplier": _Number(-math.inf),
    "ssm_in_multiplier": _Number(-math.inf),
    "ssm_out_multiplier": _Number(-math.inf),
    "lm_head_multiplier": _Number(-math.inf),
    "routed_scaling_factor": _Number(0, is_open=True),
    "swiglu_alpha": _Number(-math.inf),
    "swiglu_limit": _Number(0, is_open=True),
}
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
    "use_bidirectional_attention", "norm_topk_prob", "qkv_bias", "use_qk_norm", "rope_interleave",
    "attention_out_bias", "use_bias", "use_qkv_bias", "qk_layernorm", "use_parallel_residual",
    "alibi", "new_decoder_architecture", "multi_query", "parallel_attn", "bias", "enable_bias",
    "do_layer_norm_before", "layer_norm_elementwise_affine", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "conv_bias", "block_auto_adjust_ff_dim", "use_expert_bias",
    "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias",
    "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "altup_correct_scale",
)  # fmt: skip
_TEXTS = (
    "hidden_act", "hidden_activation", "dtype", "torch_dtype", "topk_method", "scoring_func",
)  # fmt: skip
_LAYER_TYPES = (
    "full_attention", "sliding_attention", "linear_attention", "conv", "attention", "mamba",
    "mlp", "moe",
)  # fmt: skip
_ROPES = ("rope_parameters", "rope_scaling")
#: Fields that may not be null; of the others null means the same as a field that is left out.
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "logit_scale",
    "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "logits_scaling", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias",
    "moe_shared_expert_intermediate_size", "linear_num_heads", "linear_head_dim",
)  # fmt: skip
#: Numbers of a variant of RoPE. Beside them are its kind, flags, and lists of positive numbers.
_ROPE_FLOATS = {
    "rope_theta": _Number(1, is_open=True),
    "factor": _Number(1, 2**20),
    "low_freq_factor": _Number(0, is_open=True),
    "high_freq_factor": _Number(0, is_open=True),
    "attention_factor": _Number(0, is_open=True),
    "partial_rotary_factor": _Number(0, 1, is_open=True),
    "original_max_position_embeddings": _Number(1, _INT32_MAX),
    "beta_fast": _Number(0, is_open=True),
    "beta_slow": _Number(0, is_open=True),
    "mscale": _Number(0),
    "mscale_all_dim": _Number(0),
    "llama_4_scaling_beta": _Number(0, 16),
}
_ROPE_LISTS = ("short_factor", "long_factor")


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError`, naming the field, unless every field of a decoded `config.json` that a
    family may read has the right type and lies within its bounds."""
    for name, value in config.items():
        if value is None:
            if name in _REQUIRED:
                raise ConfigError(f"{name} must not be null")
        elif name in _COUNTS:
            _check_number(name, value, _COUNTS[name], whole=True)
        elif name in _FLOATS:
            _check_number(name, value, _FLOATS[name])
        elif name in _FLAGS:
            _check_type(name, value, bool, "true or false")
        elif name in _TEXTS:
            _check_type(name, value, str, "a text")
        elif name == "layer_types":
            _check_layer_types(value)
        elif name == "mlp_only_layers":
            _check_type(name, value, list, "a list of numbers")
            for number in value:
                _check_number(name, number, _Number(0, _MAX_LAYERS), whole=True)
        elif name in _ROPES:
            _check_rope(name, value)


def four_times_hidden_size(config: Mapping[str, Any]) -> int:
    """Returns the intermediate size of families that do not name it. Raises `ConfigError` unless
    the hidden size is a whole number within its bounds."""
    size = config["hidden_size"]
    _check_number("hidden_size", size, _COUNTS["hidden_size"], whole=True)
    return 4 * int(size)


def read_multipliers(config: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """Returns the numbers of a field, each 1 where it is left out. Raises `ConfigError` unless
    there are so many."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"{name} must be a list of {count} numbers, not {_shown(values)}")
    for value in values:
        _check_number(name, value, _Number(-math.inf))
    return tuple(float(value) for value in values)


def check_shape(num_heads: int, num_kv_heads: int, head_size: int, rotary_size: int) -> None:
    """Raises `ConfigError` unless heads share keys and values evenly, and channels are rotated in
    pairs within a head."""
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads = {num_heads} must be a multiple of num_key_value_heads = "
            f"{num_kv_heads}"
        )
    if head_size < 1 or rotary_size < 2 or rotary_size % 2 or rotary_size > head_size:
        raise ConfigError(
            f"heads of size {head_size} (head_dim, or hidden_size / num_attention_heads), of which "
            f"{rotary_size} channels are rotated (partial_rotary_factor): the latter must be even "
            f"and at least 2"
        )


def _check_number(name: str, value: Any, bounds: _Number, *, whole: bool = False) -> None:
    kind = "a whole number" if whole else "a number"
    _check_type(name, value, int if whole else int | float, kind)
    low, high, is_open = bounds
    # of NaN every comparison is false; integers may be too large for a float
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, not {value}")
    if value < low or (is_open and value == low) or value > min(high, 1e308):
        least = "" if low == -math.inf else f" {'above' if is_open else 'at least'} {low:g}"
        most = "" if high == math.inf else f"{' and' if least else ''} at most {high:.10g}"
        raise ConfigError(f"{name} must be{least}{most or ''}, not {_shown(value)}")


def _check_type(name: str, value: Any, kind: Any, called: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {called}, not {_shown(value)}")


def _check_layer_types(value: Any) -> None:
    _check_type("layer_types", value, list, "a list")
    unknown = [kind for kind in value if kind not in _LAYER_TYPES]
    if unknown:
        known = " and ".join(_LAYER_TYPES)
        raise ConfigError(f"layer_types holds {_shown(unknown[0])}; supported are {known}")


def _check_rope(name: str, value: Any) -> None:
    """Checks the parameters of a variant of RoPE, or an object of them by kind of layer."""
    _check_type(name, value, dict, "an object")
    for key, item in value.items():
        path = f"{name}.{key}"
        if item is None:
            continue
        if key in _ROPE_FLOATS:
            _check_number(path, item, _ROPE_FLOATS[key])
        elif key in ("rope_type", "type"):
            _check_type(path, item, str, "a text")
        elif key in _ROPE_LISTS:
            _check_type(path, item, list, "a list of numbers")
            for factor in item:
                _check_number(path, factor, _Number(0, is_open=True))
        elif isinstance(item, dict):
            _check_rope(path, item)


def _shown(value: Any) -> str:
    """Returns a value as an error message shows it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
