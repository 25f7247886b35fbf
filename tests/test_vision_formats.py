"""Tokens that stand for pictures, and bounds of their sizes, against transformers' processors; all
else is compared in test_vision_models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    Gemma4Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from aioinfer.errors import ConfigError
from aioinfer.features.pictures.prompt import place_pictures
from aioinfer.models.vision.format import PictureError, PictureFormat, ProcessedPicture
from aioinfer.models.vision.gemma4 import Gemma4Format
from aioinfer.models.vision.idefics3 import Idefics3Format, Idefics3Tower
from aioinfer.models.vision.internvl import InternVLFormat
from aioinfer.models.vision.llava import LlavaFormat, padded_to_square
from aioinfer.models.vision.llava_onevision import OneVisionFormat
from aioinfer.models.vision.qwen_format import QwenFormat
from tests.vision_models import picture

HALF = (0.5, 0.5, 0.5)
IDEFICS3 = Idefics3Format(
    marker_id=7, placeholder_id=7, mean=HALF, std=HALF, longest=80, tile=32, tokens=4
)
QWEN = QwenFormat(
    marker_id=7, placeholder_id=7, mean=HALF, std=HALF, patch_size=14, merge_size=2,
    min_pixels=3136, max_pixels=100_000,
)  # fmt: skip
GEMMA4 = Gemma4Format(
    marker_id=7, placeholder_id=7, mean=HALF, std=HALF, begin_id=5, end_id=6, side=12, max_tokens=70
)


INTERNVL = InternVLFormat(
    marker_id=7, placeholder_id=7, mean=HALF, std=HALF, tile=32, tokens=4, max_tiles=6
)


LLAVA = LlavaFormat(marker_id=7, placeholder_id=7, mean=HALF, std=HALF, side=24, tokens=9)
ONE_VISION = OneVisionFormat(
    marker_id=7, placeholder_id=7, mean=HALF, std=HALF, tile=24, patches=3, max_tiles=4,
    resolutions=tuple((24 * row, 24 * column) for row in range(1, 4) for column in range(1, 5)),
)  # fmt: skip


class OneVisionTexts(LlavaOnevisionProcessor):
    """transformers' processor, of which texts alone are asked for."""

    def __init__(self) -> None:
        self.image_token, self.num_image_tokens = "<image>", 9
        self.vision_feature_select_strategy, self.vision_aspect_ratio = "full", "anyres_max_4"
        resolutions = [list(each) for each in ONE_VISION.resolutions]
        self.image_processor = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=resolutions)


def expanded(format: PictureFormat, processed: ProcessedPicture) -> str:
    """Returns the text of a picture, with "<image>" for each embedding."""
    first, *others = format.text(processed, "<{}>".format).split("<7>")
    runs = [f"{'<image>' * run}{text}" for run, text in zip(processed.runs, others, strict=True)]
    return first + "".join(runs)


@pytest.mark.parametrize(
    ("format", "processor", "names", "inputs"),
    [
        (
            IDEFICS3,
            Idefics3Processor,
            {
                "fake_image_token": "<fake_token_around_image>", "image_seq_len": 4,
                "global_image_tag": "<global-img>",
            },
            lambda width, height, found: {"rows": [[found.grid[0]]], "cols": [[found.grid[1]]]},
        ),
        (
            GEMMA4,
            Gemma4Processor,
            {"boi_token": "<5>", "eoi_token": "<6>"},
            lambda width, height, found: {"num_soft_tokens_per_image": [found.num_embeddings]},
        ),
        (
            INTERNVL,
            InternVLProcessor,
            {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4},
            lambda width, height, found: {
                "num_patches": [
                    GotOcr2ImageProcessorPil(
                        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=6
                    ).get_number_of_image_patches(height, width)
                ]
            },
        ),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
@pytest.mark.parametrize("size", [(200, 100), (31, 90), (64, 64), (5000, 40), (64, 129)])
def test_texts_of_pictures(
    format: PictureFormat, processor: Any, names: dict[str, Any], inputs: Any, size: tuple[int, int]
) -> None:
    processed = format.process(picture(*size))
    named: Any = SimpleNamespace(image_token="<image>", **names)
    expected = processor.replace_image_token(named, inputs(*size, processed), 0)
    assert expanded(format, processed) == expected


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (5000, 40), (640, 480), (281, 1999)])
def test_sizes_of_pictures(size: tuple[int, int]) -> None:
    width, height = size
    bounds = {"min_pixels": QWEN.min_pixels, "max_pixels": QWEN.max_pixels}
    processed = QWEN.process(picture(width, height))
    assert processed.pixels.shape[1:3] == smart_resize(height, width, 28, **bounds)
    processed = GEMMA4.process(picture(width, height))
    expected = get_aspect_ratio_preserving_size(height, width, 4, 70 * 9, 3)
    assert processed.pixels.shape[1:3] == expected


@pytest.mark.parametrize("size", [(20, 10), (96, 24), (97, 55), (200, 120), (7, 90), (1, 300)])
@pytest.mark.parametrize("count", [1, 3])
def test_embeddings_of_one_picture_and_of_several(size: tuple[int, int], count: int) -> None:
    processed = ONE_VISION.among(count).process(picture(*size))
    inputs = {
        "batch_num_images": [count], "image_sizes": [size[::-1]],
        "pixel_values": np.zeros((1, 1, 3, 24, 24)),
    }  # fmt: skip
    expected = OneVisionTexts().replace_image_token(inputs, 0)
    assert "<image>" * processed.num_embeddings == expected
    assert (len(processed.pixels) == 1) == (count > 1)


@pytest.mark.parametrize("format", [QWEN, LLAVA])
def test_a_ribbon_is_refused(format: PictureFormat) -> None:
    with pytest.raises(PictureError, match="200 times"):
        format.process(picture(5000, 20))


def test_a_table_of_positions_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"280 embeddings long, for which 839 positions"):
        Gemma4Format.read({"vision_config": {"position_embedding_size": 839}}, {}, 10**6)


def test_a_padded_ribbon_takes_little_memory() -> None:
    assert padded_to_square(picture(20_000, 5), HALF).size == (4096, 4096)


def test_equal_pixels_have_equal_keys() -> None:
    first, second = QWEN.process(picture(90, 90, 1)), QWEN.process(picture(90, 90, 1))
    assert first.key == second.key
    assert first.key != QWEN.process(picture(90, 90, 2)).key


def test_runs_of_a_picture_are_one_span() -> None:
    processed = IDEFICS3.process(picture(64, 64))
    runs = len(processed.runs)
    ids = [1, *[7, 3] * runs, 2]
    tokens, pictures = place_pictures(ids, [processed], IDEFICS3)
    (placed,) = pictures.placed
    assert tokens == [1, *[7, 7, 7, 7, 3] * runs, 2]
    assert (placed.start, placed.end) == (1, len(tokens) - 2)
    assert placed.sources.tolist()[:9] == [0, 1, 2, 3, -1, 4, 5, 6, 7]
    assert pictures.positions is None
    with pytest.raises(ValueError, match="placeholder tokens"):
        place_pictures(ids[:-3], [processed], IDEFICS3)


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_fields_of_a_tower_that_are_left_out(kind: str) -> None:
    """As in the published `config.json` of SmolVLM with 256 and 500 million parameters."""
    given = {"hidden_size": 48, "num_attention_heads": 12, "image_size": 32, "patch_size": 16}
    config = {"image_token_id": 7, "scale_factor": 2, "vision_config": given}
    default = transformers.AutoConfig.for_model(kind).vision_config
    format = Idefics3Format.read(config, {}, 2**20)
    with torch.device("meta"):
        tower = Idefics3Tower(config, format, 8)
    layers = tower.vision_model.encoder.layers
    assert len(layers) == default.num_hidden_layers
    assert layers[0].mlp.fc1.out_features == default.intermediate_size
