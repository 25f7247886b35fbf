"""States in bfloat16: half the bytes, and logits that are near to those of states in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from aioinfer.ipc.kv_spec import StateSpec
from aioinfer.llm import LLM
from aioinfer.models.causal_lm import CausalLM
from aioinfer.sampling_params import SamplingParams
from tests.paged_model import PagedModel, load_model
from tests.test_models import SINGLE, VOCAB
from tests.tiny_models import tiny_model

FAMILIES = ("qwen3_5_text", "kimi_linear", "bamba")


def decode_logits(model: CausalLM, text: list[int]) -> torch.Tensor:
    """Returns the logits of a text that is computed token by token."""
    paged = PagedModel(model, 16)
    return torch.cat([paged.step({0: [token]})[0] for token in text])


def state_bytes(model: CausalLM) -> int:
    """Returns the bytes of the matrices of one sequence."""
    specs = [spec for of_layer in model.kv_specs for spec in of_layer]
    return sum(s.nbytes for s in specs if isinstance(s, StateSpec) and len(s.shape) == 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_of_rounded_states(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, vocab_size=VOCAB)
    rng = random.Random(0)
    text = [rng.randrange(VOCAB) for _ in range(300)]
    exact, rounded = (
        load_model(folder, SINGLE, state_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    assert 2 * state_bytes(rounded) == state_bytes(exact)
    expected, found = decode_logits(exact, text), decode_logits(rounded, text)
    errors = (found - expected).square().mean(1).sqrt() / expected.std()
    assert errors[0] < 1e-5, "the first token's output does not depend on a rounded state"
    assert 1e-4 < errors[20:].mean() < 1e-2


def test_the_key(tmp_path: Path) -> None:
    """Of the configuration, under which states are kept over steps and snapshots."""
    folder = tiny_model("kimi_linear", tmp_path)
    settings = {
        "parallel.executor": "inline", "parallel.device": "cpu", "model.tokenizer": "none",
        "cache.num_blocks": 16, "cache.state_dtype": "bfloat16",
    }  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        prompt = list(range(3, 40))
        first, second = (llm.generate([prompt], greedy)[0] for _ in range(2))
        assert second.num_cached_tokens == 32
        assert first.token_ids == second.token_ids
        groups = llm.frontend.engines[0].scheduler.limits.groups
        assert any("bfloat16" in str(group.spec) for group in groups)
