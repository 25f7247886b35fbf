"""Token for token for the other families: small random Llama, Qwen2 and Qwen3 models with real
tokenizers.

Random weights make greedy text that depends on every layer and every position, so that a wrong
head, a wrong rank's shard or a wrong position shows at once; the tests assert that outputs differ
between prompts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from tests.functional.prompts import PROMPTS
from tests.functional.reference import Reference
from tests.real_tokenizers import mistral_folder, qwen_folder
from tests.tiny_models import tiny_model

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Family:
    """A model folder with a tokenizer, prompts as token ids, and what transformers makes of
    them."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def families(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_cache: Path
) -> Callable[[str], Family]:
    return cache(lambda name: make_family(name, tmp_path_factory.mktemp(name), tokenizer_cache))


@pytest.fixture
def family(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    return families(request.param)


def make_family(name: str, folder: Path, tokenizer_cache: Path) -> Family:
    tokenizer, vocab_size = (
        (mistral_folder(tokenizer_cache), 32_000)
        if name == "llama"
        else (qwen_folder(tokenizer_cache), 151_936)
    )
    tiny_model(name, folder, vocab_size=vocab_size)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    reference = Reference(folder)
    prompts = [reference.encode(text) for text in PROMPTS]
    return Family(folder, prompts, reference.generate(prompts, NEW_TOKENS))


def generate(family: Family, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    defaults = {
        "parallel__executor": "inline", "parallel__cpu_threads": 1, "scheduler__max_num_seqs": 32,
        "cache__num_blocks": 200, "model__max_model_len": 512, "model__tokenizer": "none",
    }  # fmt: skip
    merged = {key.replace("__", "."): value for key, value in (defaults | settings).items()}
    with LLM(str(family.folder), settings=merged, progress=False) as llm:
        outputs = llm.generate(prompts, GREEDY)
        llm.frontend.engines[0].scheduler.check_integrity()
        if settings.get("cache__num_blocks"):
            assert llm.frontend.stats()["preemptions"] >= 3
        if "scheduler__max_num_batched_tokens" in settings:
            assert sum(o.num_prefill_steps > 1 for o in outputs) >= 2
    return [output.token_ids for output in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"scheduler__max_num_batched_tokens": 16},
    "preempted": {"cache__num_blocks": 36},
    "small blocks": {
        "cache__block_size": 4, "cache__cpu_memory_gib": 0.05, "cache__num_blocks": None,
    },
}  # fmt: skip
#: Each family once in each run, and each way with one family at least; of the extended tests, each
#: way with two.
USUAL = [("llama", "batch"), ("llama", "chunks"), ("qwen2", "preempted"), ("qwen3", "small blocks")]
EXTENDED = [("llama", "preempted"), ("llama", "small blocks"), ("qwen2", "batch"),
            ("qwen3", "chunks")]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "way"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.extended) for case in EXTENDED)],
    indirect=["family"],
)
def test_every_way(family, way):
    assert generate(family, family.prompts, **WAYS[way]) == family.expected
    assert len({tuple(tokens) for tokens in family.expected}) > 15, (
        "the model gives the same output for every prompt"
    )


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen2", 2),
        pytest.param("llama", 4, marks=pytest.mark.extended),
        pytest.param("qwen3", 2, marks=pytest.mark.extended),
    ],
    indirect=["family"],
)
def test_tensor_parallel(family, ranks):
    subset = slice(0, 8)
    settings = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": ranks}
    assert generate(family, family.prompts[subset], **settings) == family.expected[subset]


@pytest.mark.parametrize("family", ["llama", "qwen2"], indirect=True)
def test_text_matches_the_tokenizer(family):
    settings = {"parallel.executor": "inline", "parallel.cpu_threads": 1, "cache.num_blocks": 64}
    with LLM(str(family.folder), settings=settings, progress=False) as llm:
        outputs = llm.generate(PROMPTS[:6], GREEDY)
        decode = llm.frontend.tokenizer.decode
    assert [o.prompt_token_ids for o in outputs] == family.prompts[:6]
    assert [o.token_ids for o in outputs] == family.expected[:6]
    for output in outputs:
        whole, prompt = (
            decode(output.prompt_token_ids + output.token_ids),
            decode(output.prompt_token_ids),
        )
        assert whole.startswith(prompt)
        assert output.text == whole[len(prompt) :]
