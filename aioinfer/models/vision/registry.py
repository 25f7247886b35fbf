"""Registry of what reads pictures or hears sound: from a wrapper's `model_type`, as `config.json`
has it, to the format of its pictures or clips and its tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aioinfer.config import MediaConfig, ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.rotary import Sections
from aioinfer.models.json_file import read_json
from aioinfer.models.text_model import as_wrapper, lay_over
from aioinfer.models.vision.format import PictureFormat, read_processor
from aioinfer.models.vision.tower import Tower

#: By the wrapper's `model_type`: the module and the names of its format and its tower.
_FAMILIES = {
    "qwen3_vl": ("qwen_format", "QwenFormat", "qwen3", "Qwen3Tower"),
    "qwen3_vl_moe": ("qwen_format", "QwenFormat", "qwen3", "Qwen3Tower"),
    "qwen2_vl": ("qwen_format", "QwenFormat", "qwen2", "Qwen2Tower"),
    "qwen2_5_vl": ("qwen_format", "QwenFormat", "qwen2_5", "Qwen2_5Tower"),
    "qwen3_5": ("qwen_format", "QwenFormat", "qwen3", "Qwen3Tower"),
    "qwen3_5_moe": ("qwen_format", "QwenFormat", "qwen3", "Qwen3Tower"),
    "gemma3": ("gemma3", "Gemma3Format", "gemma3", "Gemma3Tower"),
    "gemma4": ("gemma4", "Gemma4Format", "gemma4", "Gemma4Tower"),
    "internvl": ("internvl", "InternVLFormat", "internvl", "InternVLTower"),
    "internvl_chat": ("internvl_chat", "ChatFormat", "internvl_chat", "ChatTower"),
    "mistral3": ("pixtral", "PixtralFormat", "pixtral", "PixtralTower"),
    "pixtral": ("pixtral", "PixtralFormat", "pixtral", "PixtralTower"),
    "llava": ("llava", "LlavaFormat", "llava", "LlavaTower"),
    "llava_next": ("llava_next", "NextFormat", "llava_next", "NextTower"),
    "llava_onevision": (
        "llava_onevision", "OneVisionFormat", "llava_onevision", "OneVisionTower",
    ),
    "idefics3": ("idefics3", "Idefics3Format", "idefics3", "Idefics3Tower"),
    "qwen2_audio": ("sound", "Qwen2AudioFormat", "sound", "Qwen2AudioTower"),
    "voxtral": ("sound", "VoxtralFormat", "sound", "VoxtralTower"),
    "smolvlm": ("idefics3", "Idefics3Format", "idefics3", "Idefics3Tower"),
}  # fmt: skip
#: Families of the layout that `model_type` calls "llava", by the `model_type` of their tower.
_LLAVA_TOWERS: Mapping[Any, str] = {
    "clip_vision_model": "llava", "siglip_vision_model": "llava", "pixtral": "pixtral",
}  # fmt: skip

#: Pixels to which a larger picture is scaled down for models that read pictures of any size, where
#: the model's own maximum is higher.
_MAX_READ_PIXELS = 4 * 2**20

ReadFormat = Callable[[Mapping[str, Any], Mapping[str, Any], int], PictureFormat]
MakeTower = Callable[[Mapping[str, Any], PictureFormat, int], Tower]


class VisionFamily(NamedTuple):
    """How a family reads pictures.

    Attributes:
        read_format: reads `config.json`, the processor's configuration and the maximum of pixels.
        make_tower: makes a tower of `vision_config`, the format and the text model's hidden size.
    """

    read_format: ReadFormat
    make_tower: MakeTower


@dataclass(frozen=True, slots=True)
class VisionModel:
    """The part of a model that reads pictures.

    Attributes:
        config: the decoded `config.json`.
        format: of pictures.
        make: makes its tower.
    """

    config: Mapping[str, Any]
    format: PictureFormat
    make: MakeTower

    def rope_sections(self) -> Sections | None:
        """Returns the sections of M-RoPE; None without. Raises `ConfigError`."""
        if not self.format.has_sections:
            return None
        text = self.config.get("text_config")
        text = text if isinstance(text, Mapping) else self.config
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        counts = rope.get("mrope_section")
        if not isinstance(counts, list) or [type(each) for each in counts] != [int] * 3:
            raise ConfigError(f"mrope_section must be three integers, not {counts!r}")
        time, height, width = counts
        return Sections(time, height, width, self.format.interleaves_sections)

    def tower(self, backend: Backend, hidden_size: int) -> Tower:
        """Returns this rank's tower, its weights unset; in a pipeline stage behind the first one
        without modules, which only says how pictures come. Raises `ConfigError`."""
        if backend.stage > 0:
            return Tower(self.format, hidden_size)
        try:
            with torch.device("meta"):
                tower = self.make(self.config, self.format, hidden_size)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"the tower's configuration cannot be read: {text}") from error
        tower.place(backend)
        return tower


def find_vision_family(model_type: Any) -> VisionFamily | None:
    """Returns the family of a wrapper's `model_type`; None if its pictures are not read."""
    found = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        return None
    formats, format, towers, tower = found
    return VisionFamily(
        getattr(import_module(f"{__package__}.{formats}"), format).read,
        getattr(import_module(f"{__package__}.{towers}"), tower),
    )


def read_vision(folder: Path, options: ModelConfig, media: MediaConfig) -> VisionModel | None:
    """Returns what reads a model's pictures, or hears; None if it does neither.

    Args:
        folder: of the model.
        options: the section `[model]`.
        media: the section `[media]`.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    if not media.max_pictures:
        return None
    config = as_wrapper(lay_over(read_json(folder / "config.json"), options.hf_overrides))
    vision, kind = config.get("vision_config"), config.get("model_type")
    vision = config.get("audio_config") if vision is None else vision
    if not isinstance(vision, Mapping):
        return None
    if kind == "llava":
        kind = _LLAVA_TOWERS.get(vision.get("model_type"))
    family = find_vision_family(kind)
    if family is None:
        return None
    try:
        processor = read_processor(folder)
        if kind == "internvl_chat":  # whose own code has the text of the token
            config["image_token_id"] = _added_token(folder, "<IMG_CONTEXT>")
        format = family.read_format(config, processor, _MAX_READ_PIXELS)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: the configuration of pictures lacks {error}") from error
    return VisionModel(config, format, family.make_tower)


def _added_token(folder: Path, text: str) -> int:
    """Returns the id of a token that was added to a folder's tokenizer, by any of the files that
    may name it. Raises `ConfigError` without one, or if a file cannot be read."""
    files = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
    listed, decoded, ids = (read_json(folder / name, missing_ok=True) for name in files)
    try:
        named = {each["content"]: each["id"] for each in listed.get("added_tokens") or ()}
        for index, each in (decoded.get("added_tokens_decoder") or {}).items():
            named[each["content"]] = index
        return int((named | ids)[text])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: no file of the tokenizer names the token {text}") from error
