"""Small random models that read pictures, made and saved by transformers, with a tokenizer; and
what transformers generates with them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.test_sound import wav
from tests.tiny_models import randomize

_BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>",
    "<img>", "</img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]  # fmt: skip
VOCAB = 320
IMAGE = 256 + _SPECIAL.index("<|image_pad|>")
BEGIN = 256 + _SPECIAL.index("<|vision_start|>")
END = 256 + _SPECIAL.index("<|im_end|>")
_MARKERS = "<|vision_start|><|image_pad|><|vision_end|>"
_MARKERS_OF = {
    "gemma3": "<|vision_start|>", "gemma4": "<|image_pad|>", "internvl": "<|image_pad|>\n",
}  # fmt: skip
_IS_MEDIA = "part.type in ('image', 'audio')"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    f"{{% for part in message.content %}}{{% if {_IS_MEDIA} %}}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": END, "pad_token_id": None,
}  # fmt: skip


def _rope(*section: int, **others: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": list(section)}
    return {"rope_parameters": {**parameters, **others}}


_QWEN_PROCESSOR = {
    "size": {"shortest_edge": 4096, "longest_edge": 65536}, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
}  # fmt: skip
_RESOLUTIONS = [[24 * row, 24 * column] for row in range(1, 4) for column in range(1, 5)]
#: The tower, the wrapper's own fields and the processor of Mistral 3.
_MISTRAL3: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = (
    {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "image_size": 96,
        "patch_size": 8, "initializer_range": 0.2,
    },
    {"image_token_index": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": False},
    {
        "size": {"longest_edge": 96}, "patch_size": 16, "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.6, 0.4], "image_processor_type": "PixtralImageProcessor",
    },
)  # fmt: skip
#: Of each: the name of its class; the fields of its text model, tower and own; its processor.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        _rope(4, 2, 2, mrope_interleaved=True),
        {
            "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
            "num_heads": 2, "patch_size": 8, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2], "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "vision_start_token_id": 258, "vision_end_token_id": 259},
        {**_QWEN_PROCESSOR, "patch_size": 8, "image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _rope(4, 2, 2),
        {
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2,
            "patch_size": 7, "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "tie_word_embeddings": False},
        {**_QWEN_PROCESSOR, "patch_size": 7, "image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _rope(4, 2, 2),
        {
            "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
            "num_heads": 2, "patch_size": 7, "window_size": 42, "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "tie_word_embeddings": False},
        {**_QWEN_PROCESSOR, "patch_size": 7, "image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            **_rope(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True),
        },
        {
            "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
            "num_heads": 2, "patch_size": 8, "num_position_embeddings": 36,
            "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "vision_start_token_id": 258, "vision_end_token_id": 259},
        {**_QWEN_PROCESSOR, "patch_size": 8, "image_processor_type": "Qwen2VLImageProcessor"},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "sliding_window": 9, "query_pre_attn_scalar": 24, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 48, "patch_size": 8, "initializer_range": 0.2,
        },
        {
            "mm_tokens_per_image": 9, "image_token_index": IMAGE, "boi_token_index": BEGIN,
            "eoi_token_index": BEGIN + 1, "tie_word_embeddings": False,
        },
        {
            "size": {"height": 48, "width": 48}, "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4], "image_processor_type": "Gemma3ImageProcessor",
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "sliding_window": 9, "global_head_dim": 32, "use_double_wide_mlp": True,
            "num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "use_bidirectional_attention": "vision",
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 140, "standardize": True,
            "use_clipped_linears": True, "initializer_range": 0.2,
        },
        {
            "image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": BEGIN + 1,
            "tie_word_embeddings": False,
        },
        {
            "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70,
            "image_processor_type": "Gemma4ImageProcessor",
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen3"},
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": [32, 32], "patch_size": [8, 8],
            "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True,
            "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "tie_word_embeddings": False},
        {
            "size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 6,
            "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
            "image_processor_type": "GotOcr2ImageProcessor",
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        *_MISTRAL3,
    ),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
                "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7,
            },
        },
        *_MISTRAL3,
    ),
    "pixtral": (
        "LlavaForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        {
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "image_size": 96,
            "patch_size": 16, "initializer_range": 0.2,
        },
        {
            "image_token_index": IMAGE, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {
            "size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16},
            "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
            "image_processor_type": "PixtralImageProcessor",
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"model_type": "llama"},
        {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24, "patch_size": 8,
            "initializer_range": 0.2,
        },
        {"image_token_index": IMAGE},
        {
            "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24},
            "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
            "image_processor_type": "CLIPImageProcessor",
        },
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24, "patch_size": 8,
            "initializer_range": 0.2,
        },
        {"image_token_index": IMAGE, "image_grid_pinpoints": _RESOLUTIONS},
        {
            "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": _RESOLUTIONS, "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4], "image_processor_type": "LlavaNextImageProcessor",
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {"model_type": "qwen2"},
        {
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24, "patch_size": 8,
            "initializer_range": 0.2, "vision_use_head": False,
        },
        {
            "image_token_index": IMAGE, "vision_aspect_ratio": "anyres_max_4",
            "image_grid_pinpoints": _RESOLUTIONS,
        },
        {
            "size": {"height": 24, "width": 24}, "image_grid_pinpoints": _RESOLUTIONS,
            "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
            "image_processor_type": "LlavaOnevisionImageProcessor",
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"model_type": "llama"},
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "initializer_range": 0.2,
        },
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
        {
            "size": {"longest_edge": 80}, "max_image_size": {"longest_edge": 32},
            "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.4],
            "image_processor_type": "Idefics3ImageProcessor",
        },
    ),
}  # fmt: skip

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _with_experts(name: str, class_name: str, **text: Any) -> Any:
    """Returns a model as that of another name, whose text model has experts."""
    _, of_text, *others = MODELS[name]
    return class_name, {**of_text, **_EXPERTS, **text}, *others


MODELS |= {
    "qwen3_vl_moe": _with_experts("qwen3_vl", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3_5_moe": _with_experts(
        "qwen3_5", "Qwen3_5MoeForConditionalGeneration", shared_expert_intermediate_size=48
    ),
}

_SOUND = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "num_mel_bins": 20, "initializer_range": 0.2,
}  # fmt: skip
#: Families that hear, as `MODELS`; a picture is a clip of sound for them (`clip_of`).
SOUND_MODELS: dict[str, Any] = {
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"model_type": "llama"},
        {**_SOUND, "max_source_positions": 30},
        {"audio_token_id": IMAGE},
        {},
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {"model_type": "qwen2"},
        {**_SOUND, "max_source_positions": 120},
        {"audio_token_index": IMAGE},
        {},
    ),
}  # fmt: skip
MODELS |= SOUND_MODELS


#: Families whose norms store their weights less one.
_UNIT_OFFSET = ("gemma3", "qwen3_5", "qwen3_5_moe")


def save_model(name: str, folder: Path, *, head_dim: int = TEXT["head_dim"]) -> Any:
    """Saves a model in float32 with its tokenizer and its processor. Returns the model of
    transformers."""
    class_name, text, tower, own, processor = MODELS[name]
    text = {**TEXT, **text, "head_dim": head_dim}
    rope = text.get("rope_parameters")
    if rope is not None and "mrope_section" in rope:
        section = [head_dim // TEXT["head_dim"] * pairs for pairs in rope["mrope_section"]]
        text["rope_parameters"] = {**rope, "mrope_section": section}
    model_class = getattr(transformers, class_name)
    part = "audio_config" if name in SOUND_MODELS else "vision_config"
    config = model_class.config_class(text_config=text, **{part: tower}, **own)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomize(model, offset=1.0 if name in _UNIT_OFFSET else 0.0)
    _randomize_tower(model)
    if name in SOUND_MODELS:  # transformers would take a placeholder in the output for a sound's
        torch.nn.init.zeros_(model.get_output_embeddings().weight[IMAGE])
    model.save_pretrained(folder)
    template = _TEMPLATE.replace(_MARKERS, _MARKERS_OF.get(name, _MARKERS))
    if name == "qwen2_audio":  # as it was published
        template = template.replace(_IS_MEDIA, "'audio' in part or 'audio_url' in part")
    save_tokenizer(folder, template)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    return model


#: Parameters of towers that transformers makes zero, one, or small.
_RANDOM = (
    "mm_input_projection_weight", "position_embedding_table", "position_embeddings", "cls_token",
    "lambda_1", "lambda_2",
)  # fmt: skip


def _randomize_tower(model: torch.nn.Module) -> None:
    """Makes parameters random that would hide that they are left out."""
    for name, parameter in model.named_parameters():
        if name.endswith(_RANDOM):
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith(("put_min", "put_max")):
            buffer.fill_(1.5 if name.endswith("max") else -1.2)


#: Parts of names of InternVL's tensors by transformers, and in the first layout.
_FIRST_NAMES = (
    ("model.", ""), ("vision_tower.", "vision_model."), ("encoder.layer.", "encoder.layers."),
    ("cls_token", "class_embedding"), ("position_embeddings", "position_embedding"),
    ("patch_embeddings.projection", "patch_embedding"), ("lambda_", "ls"),
    ("attention.projection_layer", "attn.proj"), ("attention.", "attn."),
    ("layernorm_before", "norm1"), ("layernorm_after", "norm2"),
    ("multi_modal_projector.layer_norm", "mlp1.0"), ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)  # fmt: skip
_TEXT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def change_to_first_layout(folder: Path) -> None:
    """Changes a folder with InternVL as transformers saves it into the layout of the first
    checkpoints, which their own code reads."""
    tensors: dict[str, torch.Tensor] = {}
    saved = load_file(folder / "model.safetensors")
    for name in sorted(saved, key=lambda name: name.replace("q_proj", "")):  # q, k, v
        value = saved[name]
        if "language_model." in name or "lm_head" in name:
            tensors["language_model." + name.removeprefix("language_model.")] = value
            continue
        for ours, first in _FIRST_NAMES:
            name = name.replace(ours, first)
        for projection in "qkv":
            fused = name.replace(f"{projection}_proj", "qkv")
            if fused != name:
                value = torch.cat((tensors.pop(fused, value[:0]), value))
                name = fused
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    vision = config["vision_config"]
    vision |= {"image_size": 32, "patch_size": 8, "model_type": "intern_vit_6b"}
    vision |= {"qkv_bias": True, "qk_normalization": vision.pop("use_qk_norm")}
    del vision["attention_bias"]
    first = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 32,
        "max_dynamic_patch": 6, "min_dynamic_patch": 1, "pad2square": False, "ps_version": "v2",
        "select_layer": -1, "use_thumbnail": True, "vision_config": vision,
        "llm_config": {**config["text_config"], "architectures": ["Qwen3ForCausalLM"]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(first), "utf-8")
    names = ("image_mean", "image_std")
    processor = {name: MODELS["internvl"][4][name] for name in names} | {"size": 32}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    tokenizer = (folder / "tokenizer.json").read_text("utf-8")
    tokenizer = tokenizer.replace("<|image_pad|>", "<IMG_CONTEXT>")
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    settings = {"chat_template": _TEXT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def save_tokenizer(folder: Path, template: str = _TEMPLATE) -> None:
    """Saves a tokenizer of bytes, and a chat template."""
    vocabulary = {character: index for index, character in enumerate(_BYTES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns a picture of blots."""
    source = np.random.default_rng(seed)
    small = source.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def as_file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Returns a picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def as_url(image: Image.Image) -> str:
    """Returns a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(as_file(image)).decode()}"


def clip_of(image: Image.Image) -> np.ndarray:
    """Returns the clip of sound that stands for a picture: samples float32 [n] as a WAV file has
    them, of its width in 160 of a second."""
    source = np.random.default_rng(list(image.tobytes()[:8]))
    noise = source.standard_normal(image.width * 100 + 7) * 0.1
    clip: np.ndarray = (np.round(noise * 32767) / 32768).astype(np.float32)
    return clip


def conversation(*parts: str | Image.Image, hears: bool = False) -> list[dict[str, Any]]:
    """Returns a user's message of texts and pictures, or the clips of sound that stand for them, as
    OpenAI's chat has it."""

    def media(image: Image.Image) -> dict[str, Any]:
        if not hears:
            return {"type": "image_url", "image_url": {"url": as_url(image)}}
        data = base64.b64encode(wav(clip_of(image) * (32768 / 32767))).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    content = [
        {"type": "text", "text": part} if isinstance(part, str) else media(part) for part in parts
    ]
    return [{"role": "user", "content": content}]


def reference_inputs(name: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """Returns what transformers' processor makes of pictures, or of the clips that stand for
    them."""
    if name in SOUND_MODELS:
        return _reference_sounds(name, [clip_of(each) for each in pictures])
    fields = {key: value for key, value in MODELS[name][4].items() if key != "image_processor_type"}
    class_name = MODELS[name][4]["image_processor_type"] + "Pil"
    # LLaVA-OneVision's reads pictures of one conversation and of several unlike
    given = [list(pictures)] if name == "llava_onevision" else list(pictures)
    found = getattr(transformers, class_name)(**fields)(given, return_tensors="pt")
    counts = ("num_crops", "num_soft_tokens_per_image", "num_patches")
    return {key: value for key, value in found.items() if key not in counts}


def _reference_sounds(name: str, clips: Sequence[np.ndarray]) -> dict[str, Any]:
    tower = SOUND_MODELS[name][2]
    steps = 2 * tower["max_source_positions"]
    extract = transformers.WhisperFeatureExtractor(feature_size=tower["num_mel_bins"])
    options: dict[str, Any] = {"sampling_rate": 16_000, "return_tensors": "pt"}
    if name == "qwen2_audio":
        found = extract(
            list(clips), **options, padding="max_length", max_length=160 * steps,
            return_attention_mask=True,
        )  # fmt: skip
        mask = found.attention_mask
        return {"input_features": found.input_features, "feature_attention_mask": mask}
    whole = [  # as transformers' VoxtralProcessor
        extract(each, **options, padding=True, truncation=False, pad_to_multiple_of=160 * steps)
        for each in clips
    ]
    parts = [part for each in whole for part in each.input_features[0].split(steps, dim=1)]
    return {"input_features": torch.stack(parts)}


class Reference(NamedTuple):
    """Tokens, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


@torch.inference_mode()
def reference_output(
    model: Any, name: str, prompt: Sequence[int], pictures: Sequence[Image.Image], count: int
) -> Reference:
    """Returns what transformers generates greedily, each step from the beginning."""
    inputs = reference_inputs(name, pictures) if pictures else {}
    ids, logprobs = list(prompt), []
    kind = {"gemma3": "token_type_ids"}.get(name, "mm_token_type_ids")
    takes_kinds = name.startswith(("qwen", "gemma"))
    for _ in range(count):
        given = torch.tensor([ids])
        kinds = {kind: (given == IMAGE).int()} if takes_kinds else {}
        logits = model(input_ids=given, use_cache=False, **kinds, **inputs).logits[0, -1]
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1).max()))
        if ids[-1] == END:
            break
    return Reference(ids[len(prompt) :], logprobs)
