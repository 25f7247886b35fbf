"""A real draft model: Qwen2.5-Coder 0.5B drafts for 1.5B (`make test-drafts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.features.speculation.costs import RowTimes
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS, DRAFTS
from tests.models.files import LARGER_QWEN, QWEN

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

QUESTIONS = (
    "Write a Python function that merges two sorted lists.",
    "Explain in two sentences what a hash table is.",
    "Write a SQL query for the three most expensive products of each category.",
    "List the planets of the solar system as JSON.",
)
NUM_DRAFTS, TOKENS = 3, 64


@contextmanager
def running(file: Path, **speculation: Any) -> Iterator[LLM]:
    settings = {
        "model.max_model_len": 512, "cache.num_blocks": 160, "scheduler.max_num_seqs": 4,
        "parallel.device": "cpu", "parallel.executor": "inline", "parallel.cpu_threads": 2,
        **{f"speculation.{name}": value for name, value in speculation.items()},
    }  # fmt: skip
    with LLM(str(file), settings=settings, progress=False) as llm:
        yield llm


def generate(llm: LLM) -> list[list[int]]:
    """The tokens of all questions, greedy and sampled."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=TOKENS)
        for temperature in (0.0, 0.7)
    ]
    return [
        output.token_ids
        for each in params
        for output in llm.chat(chats, [each] * len(chats), use_tqdm=False)
    ]


def test_a_smaller_model_drafts_for_a_larger_one(
    gguf_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are equal, and most drafts are kept. Always three, whatever they cost."""
    target, small = gguf_path(LARGER_QWEN), gguf_path(QWEN)
    if not target.exists():
        pytest.skip("needs the weights of `make test-drafts`")
    with running(target, method="none") as llm:
        expected = generate(llm)
    monkeypatch.setattr(RowTimes, "seconds", lambda self, rows: 0.001)
    with running(target, model=str(small), max_draft_tokens=NUM_DRAFTS) as llm:
        assert llm.frontend.config.speculation.method == "draft"
        assert generate(llm) == expected
        counts = llm.frontend.engines[0].metrics.counts
    tokens = sum(map(len, expected))
    share, mean = counts[ACCEPTED] / counts[DRAFT_TOKENS], 1 + counts[ACCEPTED] / counts[DRAFTS]
    print(f"{tokens} tokens, {share:.2f} of the drafts kept, {mean:.2f} tokens a step")  # noqa: T201
    assert share > 0.4
