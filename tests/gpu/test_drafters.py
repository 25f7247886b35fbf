"""Drafters on a GPU: the text of a plain run, in graphs and without; a draft model that is the
target is nearly always right; and nothing is compiled while serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_settings import (
    NEEDS_FOUR,
    NEEDS_TWO,
    TWO_RANKS,
    TWO_STAGES,
    check_nothing_was_compiled,
    worker_of,
)
from random_models import random_model, random_prompts
from test_speculation import (
    PARAMS,
    PROMPTS,
    TOKENS,
    VOCAB_SIZE,
    check,
    equal_texts,
    look_always_ahead,
    running,
)

# fixtures
from test_speculation import expected as expected
from test_speculation import folder as folder

from aioinfer import SamplingParams
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from aioinfer.llm import Output
from aioinfer.worker.gpu_device import GpuDevice
from tests.eagle_models import eagle_head


@pytest.fixture(scope="module")
def drafters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings of drafters by name."""
    small = random_model(
        tmp_path_factory.mktemp("small"), vocab_size=VOCAB_SIZE - 8, family="llama", head_dim=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    head = tmp_path_factory.mktemp("head")
    eagle_head(
        head, "midlayer", hidden_size=256, vocab_size=VOCAB_SIZE, draft_size=1000, taps=(0, 2, 3),
        head_size=64, deviation=0.05,
    )  # fmt: skip
    models = {"the target": ("draft", folder), "small": ("draft", small), "head": ("eagle3", head)}
    return {
        name: {"speculation__method": method, "speculation__model": str(model)}
        for name, (method, model) in models.items()
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("the target", {}),
        ("small", {}),
        ("head", {}),
        ("head", {"parallel__cuda_graphs": False}),
        ("the target", {"cache__num_blocks": 24}),
        ("small", {"scheduler__max_num_seqs": 3}),
        ("head", {"scheduler__max_num_batched_tokens": 64}),
        ("the target", {"cache__enable_prefix_caching": True}),
        pytest.param("small", TWO_RANKS, marks=[NEEDS_TWO, pytest.mark.timeout(300)]),
        pytest.param("head", TWO_RANKS, marks=[NEEDS_TWO, pytest.mark.timeout(300)]),
        *(
            pytest.param(name, TWO_STAGES | more, marks=[needed, pytest.mark.timeout(300)])
            for name, more, needed in [
                ("the target", {}, NEEDS_TWO),
                ("small", {"scheduler__max_num_batched_tokens": 64}, NEEDS_TWO),
                ("head", {}, NEEDS_TWO),
                ("head", {"parallel__cuda_graphs": False}, NEEDS_TWO),
                ("head", {"parallel__tensor_parallel_size": 2}, NEEDS_FOUR),
            ]
        ),
    ],
    ids=str,
)
def test_text_is_that_of_a_plain_run(
    folder: Path, drafters: Any, expected: list[Output], name: str, settings: dict[str, Any]
) -> None:
    with running(folder, **drafters[name], **settings) as llm:
        look_always_ahead(llm)
        check(llm.generate(PROMPTS, PARAMS), expected)
        counts = llm.frontend.engines[0].metrics.counts
        assert counts[DRAFT_TOKENS] > 500
        if "parallel__executor" not in settings:
            device = worker_of(llm).runner.device
            assert isinstance(device, GpuDevice)
            graphs = settings.get("parallel__cuda_graphs", True)
            assert bool(device.graphs.lookahead.graphs) == graphs


@pytest.mark.parametrize("graphs", [True, False])
def test_a_predicted_output_goes_before_the_drafts_of_a_drafter(
    folder: Path, drafters: Any, expected: list[Output], graphs: bool
) -> None:
    """The drafter is hardly ever right, and the prediction is, but for three tokens."""
    params = [
        replace(each, predicted_tokens=(*output.token_ids[:20], 1, 2, 3, *output.token_ids[23:]))
        for each, output in zip(PARAMS, expected, strict=True)
    ]
    with running(folder, **drafters["small"], parallel__cuda_graphs=graphs) as llm:
        look_always_ahead(llm)
        check(llm.generate(PROMPTS, params), expected)
        assert llm.frontend.engines[0].metrics.counts[ACCEPTED] > 0.2 * TOKENS * len(PROMPTS)
        check_nothing_was_compiled(llm)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_nearly_always_right(
    temperature: float, tmp_path: Path
) -> None:
    """Its text lacks the second token, which windows of 24 tokens leave behind."""
    random_model(
        tmp_path, family="mistral", vocab_size=VOCAB_SIZE, head_dim=64, sliding_window=24,
        eos_token_id=None, max_position_embeddings=1024,
    )  # fmt: skip
    prompts = random_prompts([100 + 7 * i for i in range(8)], VOCAB_SIZE)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS, ignore_eos=True)
    with running(tmp_path) as llm:
        expected = llm.generate(prompts, params)
    settings = {"speculation__method": "draft", "speculation__model": str(tmp_path)}
    with running(tmp_path, **settings) as llm:
        look_always_ahead(llm)
        outputs = llm.generate(prompts, params)
        counts = llm.frontend.engines[0].metrics.counts
    assert equal_texts(outputs, expected) >= len(prompts) - 1
    # every seventh step is plain, and leaves the next one without drafts
    assert counts[ACCEPTED] > 0.75 * counts[DRAFT_TOKENS] > 100


@pytest.mark.parametrize("name", ["small", "head"])
def test_nothing_is_compiled_while_serving(folder: Path, drafters: Any, name: str) -> None:
    with running(folder, model__dtype="bfloat16", **drafters[name]) as llm:
        look_always_ahead(llm)
        llm.generate(PROMPTS, PARAMS)
        llm.generate(PROMPTS[:1], PARAMS[:1])
        check_nothing_was_compiled(llm)
