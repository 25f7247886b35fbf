"""The text model of a checkpoint that has other parts, such as a vision tower: its configuration,
and the names of its tensors.

`*ForConditionalGeneration` names a wrapper: a text model of a family, and towers and projectors
whose outputs take the place of some embeddings. The text model alone is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: The architecture of a text model by its `model_type`. "qwen2_vl", "qwen2_5_vl" and "glm4v" are
#: the wrapper's own: their first checkpoints have the text model's fields among the wrapper's.
_ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4v": "Glm4ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
#: Fields of text models that published configurations of wrappers leave out: transformers writes
#: no field of a part that has its class's default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_moe_text": {"attention_bias": True},
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "qwen3": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32_768,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}  # fmt: skip
#: Text models whose heads are always as wide as the hidden size over their number.
_DIVIDED_HEADS = ("glm4v", "glm4v_text")
#: Prefixes of tensors that stand for others: of wrappers' text models, in older and newer
#: checkpoints, of Voxtral and Qwen2-Audio as transformers 5.17 saves them, of GPT-2 and OPT saved
#: without their head, and of Nemotron-H.
_PREFIXES = (
    ("model.text_model.", "model."), ("language_model.model.model.", "model."),
    ("language_model.", ""), ("model.language_model.", "model."),
    ("h.", "transformer.h."),
    ("wte.", "transformer.wte."), ("wpe.", "transformer.wpe."), ("ln_f.", "transformer.ln_f."),
    ("decoder.", "model.decoder."), ("backbone.", "model."),
)  # fmt: skip
#: The prefix of an encoder in a checkpoint with a head; "model." is that of ModernBERT alone.
_ENCODER = re.compile(
    r"(bert|roberta|distilbert|mpnet)\.|model\.(?=layers\.\d+\.(attn\.W|mlp\.W|attn_norm|mlp_norm)"
    r"|embeddings\.(tok_embeddings|norm)\.|final_norm\.)"
)
#: Ends of the names of a LayerNorm's parameters in the first checkpoints of BERT.
_OLD_ENDS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
#: Prefixes of the tensors of other parts, which may have "model." before them.
_OTHER_PARTS = (
    "vision_tower.", "vision_model.", "vision_encoder.", "visual.", "audio_tower.",
    "connector.", "multi_modal_projector.", "mm_projector.", "mlp1.", "image_newline",
    "embed_vision.", "embed_audio.",
)  # fmt: skip
_ROPES = ("rope_scaling", "rope_parameters")


def read_text_config(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the configuration of the text model of a decoded `config.json`: `text_config` laid
    over the wrapper's fields, with `architectures` of the text model. A configuration that is not
    of a wrapper is returned as it is, and so is one whose text model is unknown.

    Args:
        config: the decoded `config.json`.
        overrides: `model.hf_overrides`, laid over it before.
    """
    config = as_wrapper(lay_over(config, overrides or {}))
    if not _is_wrapper(config):
        return config
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    kind = str(text.get("model_type") or config.get("model_type"))
    names = text.get("architectures")
    if (names is None or names == ["VLlama3ForCausalLM"]) and kind in _ARCHITECTURES:
        names = [_ARCHITECTURES[kind]]  # the latter is SmolVLM's own name of Llama
    if names is None:
        return config
    given = {name: value for name, value in text.items() if value is not None}
    nulls = dict.fromkeys(text.keys() - given.keys())  # such as that of sliding_window: no window
    merged = {**nulls, **_DEFAULTS.get(kind, {}), **config, **given, "architectures": names}
    if config.get("tie_word_embeddings") is not None:  # the wrapper has the head
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    if kind in _DIVIDED_HEADS:
        merged["head_dim"] = merged["hidden_size"] // merged["num_attention_heads"]
    return merged | {name: _text_rope(merged[name]) for name in _ROPES if merged.get(name)}


def lay_over(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with other values for some keys; objects in both are merged."""
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = lay_over(old, value)
        merged[name] = value
    return merged


def as_wrapper(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of InternVL in its first layout, which its own code reads
    (`InternVLChatModel`), as a wrapper's; others as they are."""
    names, text = config.get("architectures"), config.get("llm_config")
    if names != ["InternVLChatModel"] or not isinstance(text, Mapping):
        return config
    return {
        **config,
        "architectures": ["InternVLForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    }


def _is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a decoded `config.json` is of a text model and other parts."""
    names = config.get("architectures")
    is_named = isinstance(names, list) and any(
        str(name).endswith("ForConditionalGeneration") for name in names
    )
    return is_named and ("text_config" in config or "vision_config" in config)


def _text_rope(rope: Any) -> Any:
    """Returns the parameters of RoPE for text alone. In M-RoPE (Qwen2-VL, Wang et al. 2024) each
    pair of channels is rotated by one of three positions, which are equal for text."""
    if not isinstance(rope, Mapping):
        return rope
    kept = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def own_name(stored: str) -> str:
    """Returns the name of a text model's tensor, such as "model.norm.weight", given its name in a
    checkpoint, with or without the prefix of a wrapper or of an encoder with a head; tensors of
    other parts lose a "model." before them, and a tower's a second name."""
    if is_other_part(stored):
        part = stored.removeprefix("model.")
        if part.startswith("vision_tower.vision_model."):
            return part.replace("vision_model.", "", 1)
        return part
    for prefix, own in _PREFIXES:
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    if found := _ENCODER.match(stored):
        stored = stored[found.end() :]
    for old, new in _OLD_ENDS.items():
        if stored.endswith(old):
            return stored.removesuffix(old) + new
    return stored


def possible_names(own: str) -> list[str]:
    """Returns the names that a text model's module may have in checkpoints, its own one first."""
    return [own, *(prefix + own.removeprefix(mine) for prefix, mine in _PREFIXES
                   if own.startswith(mine))]  # fmt: skip


def is_other_part(name: str) -> bool:
    """Whether a tensor of a wrapper's checkpoint is of a part that is not loaded."""
    return name.removeprefix("model.").startswith(_OTHER_PARTS)
