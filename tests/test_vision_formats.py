"""Tokens that stand for pictures, and bounds of their sizes, against transformers' processors; all
else is compared in test_vision_models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Idefics3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from aioinfer.features.pictures.prompt import place_pictures
from aioinfer.models.vision.format import PictureError
from aioinfer.models.vision.gemma4 import Gemma4Format
from aioinfer.models.vision.idefics3 import Idefics3Format
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


@pytest.mark.parametrize("size", [(200, 100), (31, 90), (64, 64)])
def test_the_text_of_tiles(size: tuple[int, int]) -> None:
    processed = IDEFICS3.process(picture(*size))
    names: Any = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>",
        image_token="<image>", image_seq_len=1,
    )  # fmt: skip
    rows, columns = processed.grid
    grid = {"rows": [[rows]], "cols": [[columns]]}
    expected = Idefics3Processor.replace_image_token(names, grid, 0)
    assert IDEFICS3.text(processed, lambda token: "<image>") == expected
    assert expected.count("<image>") == len(processed.runs) == len(processed.pixels) > 1


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (5000, 40), (640, 480), (281, 1999)])
def test_sizes_of_pictures(size: tuple[int, int]) -> None:
    width, height = size
    bounds = {"min_pixels": QWEN.min_pixels, "max_pixels": QWEN.max_pixels}
    processed = QWEN.process(picture(width, height))
    assert processed.pixels.shape[1:3] == smart_resize(height, width, 28, **bounds)
    processed = GEMMA4.process(picture(width, height))
    expected = get_aspect_ratio_preserving_size(height, width, 4, 70 * 9, 3)
    assert processed.pixels.shape[1:3] == expected


def test_a_ribbon_is_refused() -> None:
    with pytest.raises(PictureError, match="200 times"):
        QWEN.process(picture(5000, 20))


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
