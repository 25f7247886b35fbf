"""SmolLM2 with its weights as quantized as they are in the GGUF file, beside the same in float32:
what it says of a text, token by token."""

from __future__ import annotations

from pydoc_data import topics

import numpy as np
import pytest

from aioinfer import LLM, SamplingParams
from tests.functional.test_equality import MODEL

pytestmark = pytest.mark.extended

SETTINGS = {
    "parallel.executor": "inline", "parallel.cpu_threads": 1, "scheduler.max_num_seqs": 4,
    "cache.cpu_memory_gib": 0.1, "model.max_model_len": 1024,
}  # fmt: skip
NUM_TOKENS = 600


def logprobs(quantization: str) -> np.ndarray:
    """The log-probability of each token of a text but the first."""
    settings = SETTINGS | {"model.quantization": quantization}
    with LLM(MODEL, settings=settings, progress=False) as llm:
        assert llm.frontend.tokenizer is not None
        tokens = llm.frontend.tokenizer.encode(topics.topics["types"])[:NUM_TOKENS]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.generate([tokens], params)
        summary = llm.frontend.engines[0].report.implementation
    assert ("gguf: 4 bits in groups of 32" in summary) == (quantization == "auto")
    assert output.prompt_scores is not None
    return np.array(output.prompt_scores.logprobs)


def test_what_it_says_is_as_with_float32():
    """Weights are rounded to 11 bits, or not at all: perplexity stays within a thousandth."""
    kept, expanded = logprobs("auto"), logprobs("none")
    assert len(kept) == len(expanded) == NUM_TOKENS - 1
    assert abs(kept.mean() - expanded.mean()) < 1e-3
    assert np.abs(kept - expanded).max() < 0.05
