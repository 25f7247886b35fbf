"""Every family that reads pictures against transformers, greedily in float32: texts and pictures
however they are batched, cut, cached and preempted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from aioinfer.config import MediaConfig, ModelConfig
from aioinfer.engine import pictures
from aioinfer.errors import ConfigError, OverloadedError
from aioinfer.features.pictures.planning import Planning
from aioinfer.features.pictures.worker import pictures_of_rank
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.llm import LLM, Output
from aioinfer.models.registry import build_model
from aioinfer.models.vision.registry import read_vision
from aioinfer.sampling_params import SamplingParams
from tests.vision_models import (
    IMAGE,
    MODELS,
    SOUND_MODELS,
    Reference,
    change_to_first_layout,
    clip_of,
    conversation,
    picture,
    reference_inputs,
    reference_output,
    save_model,
)
from tests.worker_extension import count_pictures, has_compiler

TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
WIDE, HIGH, SMALL = picture(200, 120, 1), picture(90, 210, 2), picture(40, 30, 3)
Parts = tuple[str | Image.Image, ...]
TURNS: list[Parts] = [
    ("A text alone",),
    ("What is this? ", WIDE),
    (HIGH, "and", SMALL, "and ", WIDE, " differ: how?"),
    ("The same twice: ", SMALL, SMALL),
]


class Saved(NamedTuple):
    folder: Path
    name: str
    model: Any
    expected: dict[int, Reference]


#: For tests of all families; and of one, the others being tested beside `make test`.
EVERY = pytest.mark.parametrize(
    "saved",
    [
        # with the towers of others
        pytest.param(name, marks=pytest.mark.extended)
        if name in ("qwen3_vl_moe", "qwen3_5_moe")
        else name
        for name in MODELS
    ],
    indirect=True,
)
EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in MODELS if name != "qwen3_vl"]
#: One whose pictures chunks cut, one whose pictures stay whole, and one with tiles.
CUT = pytest.mark.parametrize(
    "saved",
    [
        name if name in ("qwen3_vl", "gemma4", "llava_onevision")
        else pytest.param(name, marks=pytest.mark.extended)
        for name in MODELS
    ],
    indirect=True,
)  # fmt: skip
ONE = pytest.mark.parametrize("saved", ["qwen3_vl", *EXTENDED], indirect=True)
#: For what depends on where pictures lie among the tokens, and not on a tower: one with positions
#: of three axes and pictures in several layers (qwen3_vl), and with states beside its keys, one
#: whose pictures stay whole, one with tokens that end rows, one with tiles, and one that hears.
KINDS = pytest.mark.parametrize(
    "saved",
    [
        "qwen3_vl",
        *(pytest.param(name, marks=pytest.mark.extended)
          for name in ("qwen3_5", "gemma4", "pixtral", "llava_onevision", "qwen2_audio")),
    ],
    indirect=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Makes each model once, whatever lists of them tests have."""

    def make(name: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        return Saved(folder, name, save_model(name, folder), {})

    return cache(make)


@pytest.fixture
def saved(request: pytest.FixtureRequest, make_saved: Callable[[str], Saved]) -> Saved:
    return make_saved(request.param)


def opened(saved: Saved, **settings: Any) -> LLM:
    given = {
        "model.dtype": "float32", "cache.block_size": 16, "parallel.executor": "inline",
        "scheduler.max_num_seqs": 8, "model.max_model_len": 1024,
        "cache.cpu_memory_gib": 0.2, **settings,
    }  # fmt: skip
    return LLM(str(saved.folder), progress=False, settings=given)


def check(saved: Saved, turns: Sequence[Parts], outputs: Sequence[Output]) -> None:
    for number, (parts, output) in enumerate(zip(turns, outputs, strict=True)):
        key = TURNS.index(parts) if parts in TURNS else -1 - number
        if key not in saved.expected or key < 0:
            pictures = [part for part in parts if not isinstance(part, str)]
            saved.expected[key] = reference_output(
                saved.model, saved.name, output.prompt_token_ids, pictures, TOKENS
            )
        expected = saved.expected[key]
        assert output.token_ids == expected.tokens, parts
        found = [each.logprob for each in output.completions[0].logprobs or ()]
        assert found == pytest.approx(expected.logprobs, abs=2e-4), parts


def chat(llm: LLM, turns: Sequence[Parts]) -> list[Output]:
    return llm.chat([said(llm, parts) for parts in turns], PARAMS)


def said(llm: LLM, parts: Parts) -> list[dict[str, Any]]:
    return conversation(*parts, hears="audio" in llm.frontend.input_modalities)


def features_of(llm: LLM) -> Planning:
    found: Planning = llm.frontend.engines[0].features.of(Planning)
    return found


WITH_PICTURES = pytest.mark.parametrize(
    "saved", [each for each in MODELS if each not in SOUND_MODELS], indirect=True
)


@WITH_PICTURES
def test_pixels_and_counts_are_transformers_s(saved: Saved) -> None:
    vision = read_vision(saved.folder, ModelConfig(path=""), MediaConfig())
    assert vision is not None
    with torch.device("meta"):
        tower = vision.make(vision.config, vision.format, 64)
    for image in (WIDE, HIGH, SMALL, picture(333, 77, 4), picture(16, 16, 5)):
        processed = vision.format.process(image)
        inputs = reference_inputs(saved.name, [image])
        expected = inputs["pixel_values"]
        if "image_position_ids" in inputs:  # of patches, which are filled up to a number
            expected = expected[(inputs["image_position_ids"] >= 0).all(-1)]
        normed = tower.normalised(torch.from_numpy(processed.pixels.copy()))
        found = tower.as_reference(normed)
        assert torch.allclose(found, expected.reshape(found.shape), atol=2e-6)
    dummy = vision.format.dummy(12)
    assert 1 <= dummy.num_embeddings <= 12


@WITH_PICTURES
@torch.inference_mode()
def test_a_tower_has_positions_for_ribbons(saved: Saved) -> None:
    vision = read_vision(saved.folder, ModelConfig(path=""), MediaConfig())
    assert vision is not None
    tower = vision.make(vision.config, vision.format, 64)
    for size in ((1, 1), (1, 190), (190, 1)):
        processed = vision.format.process(picture(*size))
        found = tower.encode([torch.from_numpy(processed.pixels.copy())], [processed.grid])
        assert len(found) == processed.num_embeddings > 0


@EVERY
def test_all_together(saved: Saved) -> None:
    with opened(saved) as llm:
        outputs = chat(llm, TURNS)
        check(saved, TURNS, outputs)
        # equal pictures are encoded once; LLaVA-OneVision's tiles of one, and it among others
        assert len(features_of(llm).cache) == (4 if saved.name == "llava_onevision" else 3)
        assert len({tuple(output.token_ids) for output in outputs}) == len(TURNS)


@CUT
def test_chunks_cut_pictures_and_the_cache_holds_one(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaConfig, "encoder_budget", 1)
    monkeypatch.setattr(MediaConfig, "cache_embeddings", largest(saved))
    settings = {**budget(saved, 24), "cache.enable_prefix_caching": False}
    with opened(saved, **settings) as llm:
        check(saved, TURNS, chat(llm, TURNS))


def budget(saved: Saved, tokens: int) -> dict[str, int]:
    """Returns the setting of a step's tokens: as many, or where pictures are not cut as the largest
    has, and one for each other request."""
    if saved.name in ("gemma3", "gemma4"):
        tokens = max(tokens, largest(saved) + 8)
    return {"scheduler.max_num_batched_tokens": tokens}


def largest(saved: Saved) -> int:
    vision = read_vision(saved.folder, ModelConfig(path=""), MediaConfig())
    assert vision is not None
    format = vision.format
    given = [clip_of(each) if format.hears else each for each in (WIDE, HIGH, SMALL)]
    return max(format.process(each).num_embeddings for each in given)


@ONE
def test_prefixes_with_the_same_picture_are_found_again(saved: Saved) -> None:
    text, other = "Some words before it, and then ", picture(200, 120, 9)
    turns: list[Parts] = [
        (text, WIDE, " a question"), (text, WIDE, " another question"), (text, other, " a question")
    ]  # fmt: skip
    with opened(saved) as llm:
        outputs = [chat(llm, [parts])[0] for parts in turns]
        check(saved, turns, outputs)
        (again,) = chat(llm, turns[:1])
        assert again.token_ids == outputs[0].token_ids
        first, same, different = (output.num_cached_tokens for output in outputs)
        assert first == 0
        start = outputs[0].prompt_token_ids.index(features_placeholder(llm))
        assert again.num_cached_tokens > start + largest_run(outputs[0], llm) // 2
        assert different <= start
        if not saved.name.startswith("qwen3_5"):  # which keeps states at a few places alone
            assert same > start + largest_run(outputs[1], llm) // 2
            assert different > 0


def features_placeholder(llm: LLM) -> int:
    reader = llm.frontend._pictures
    assert reader is not None
    return reader._format.placeholder_id


def largest_run(output: Output, llm: LLM) -> int:
    return output.prompt_token_ids.count(features_placeholder(llm))


@KINDS
def test_preemption(saved: Saved) -> None:
    """Two prompts fit the KV cache, and not what they generate."""
    with opened(saved) as llm:
        length = len(chat(llm, TURNS[3:])[0].prompt_token_ids)
    settings = {
        "cache.num_blocks": 2 * -(-length // 4) + 1, "cache.block_size": 4,
        "cache.enable_prefix_caching": False, "model.max_model_len": length + TOKENS,
        **budget(saved, 64),
    }  # fmt: skip
    with opened(saved, **settings) as llm:
        turns = [TURNS[0], *TURNS[3:] * 3]
        check(saved, turns, chat(llm, turns))
        assert llm.frontend.stats()["preemptions"] > 0


@ONE
def test_two_ranks(saved: Saved) -> None:
    """Each computes some of the pictures of a step."""
    settings = {"parallel.executor": "multiprocess", "parallel.tensor_parallel_size": 2}
    with opened(saved, **settings) as llm:
        assert llm.collective_rpc(count_pictures) == [[], []]
        assert llm.collective_rpc(has_compiler) == [False, False]
        check(saved, TURNS, chat(llm, TURNS))
        first, second = llm.collective_rpc(count_pictures)
        # a picture that is alone in its step is computed by both
        assert len(features_of(llm).cache) <= sum(first) + sum(second)
        assert min(sum(first), sum(second)) < len(features_of(llm).cache)


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([4, 4], 2, [(0, 1), (1, 2)]),
        ([4, 4, 4], 2, [(0, 1), (1, 3)]),
        ([100, 1, 1], 2, [(0, 1), (1, 3)]),
        ([1, 1, 100], 2, [(0, 2), (2, 3)]),
        ([5], 3, [(0, 0), (0, 1), (1, 1)]),
        ([1, 2, 3, 4, 5, 6], 3, [(0, 3), (3, 5), (5, 6)]),
    ],
)
def test_pictures_of_ranks(counts: list[int], size: int, expected: list[tuple[int, int]]) -> None:
    """Each picture is one rank's."""
    found = [pictures_of_rank(counts, rank, size) for rank in range(size)]
    assert found == expected
    assert [n for first, end in found for n in range(first, end)] == [*range(len(counts))]


@ONE
def test_two_stages(saved: Saved) -> None:
    """Parts of pictures, of which the first stage alone has the embeddings, in steps of fewer
    tokens than two dummy prompts would have."""
    settings = {"parallel.executor": "multiprocess", "parallel.pipeline_parallel_size": 2}
    with opened(saved, **settings, **budget(saved, 12)) as llm:
        check(saved, TURNS, chat(llm, TURNS))


@pytest.mark.parametrize("saved", ["qwen3_vl"], indirect=True)
def test_layers_that_pictures_go_into_are_of_the_first_stage(saved: Saved) -> None:
    backend = Backend(torch.device("meta"), torch.float32, ParallelGroup.single(), num_stages=3)
    with pytest.raises(ConfigError, match="must be in the first pipeline stage"):
        build_model(saved.folder, backend, media=MediaConfig())


@KINDS
def test_drafts(saved: Saved) -> None:
    settings = {"speculation.method": "ngram", **budget(saved, 40)}
    with opened(saved, **settings) as llm:
        check(saved, TURNS, chat(llm, TURNS))


@KINDS
def test_several_sequences_of_a_prompt(saved: Saved) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, n=2)
    with opened(saved) as llm:
        (output,) = llm.chat([said(llm, TURNS[1])], params)
        check(saved, TURNS[1:2], [output])
        assert output.completions[1].token_ids == output.token_ids


@KINDS
def test_more_pictures_than_memory_takes(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations wait for the answers of others, whose pictures are then freed. None are kept
    for later requests, which would not count."""
    monkeypatch.setattr(pictures, "_MAX_HELD_BYTES", 1)
    monkeypatch.setattr(pictures, "_MAX_RECENT_BYTES", 0)
    turns = [("What is this? ", WIDE), ("A text alone",), ("Which?", HIGH), ("And this?", SMALL)]
    with opened(saved) as llm:
        check(saved, turns, chat(llm, turns))
        with pytest.raises(OverloadedError, match="use all memory"):
            chat(llm, [("Two: ", WIDE, HIGH)])


@pytest.mark.parametrize("saved", ["internvl"], indirect=True)
def test_the_first_layout_of_internvl(saved: Saved, tmp_path: Path) -> None:
    turns = [*TURNS, ("Not a picture: <IMG_CONTEXT>", SMALL)]
    with opened(saved) as llm:
        expected = chat(llm, turns)
    folder = shutil.copytree(saved.folder, tmp_path / "first")
    change_to_first_layout(folder)
    first = saved._replace(folder=folder)
    with opened(first) as llm:
        assert llm.frontend.input_modalities == ["text", "image"]
        for found, output in zip(chat(llm, TURNS), expected, strict=False):
            assert found.prompt_token_ids == output.prompt_token_ids
            assert found.token_ids == output.token_ids
        (marked,) = chat(llm, turns[-1:])
        assert marked.prompt_token_ids.count(IMAGE) == expected[-1].prompt_token_ids.count(IMAGE)
    with opened(first, **{"media.max_pictures": 0}) as llm:
        (alone,) = llm.generate([expected[0].prompt_token_ids], PARAMS)
        assert alone.token_ids == expected[0].token_ids
