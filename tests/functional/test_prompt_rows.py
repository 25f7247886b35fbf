"""Outputs of prompt rows equal those of transformers in float32: log-probabilities of the prompt's
tokens, and pooled hidden states, under every way of getting there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer import LLM, SamplingParams
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig, load_config
from aioinfer.errors import RequestError
from tests.functional.prompts import PROMPTS
from tests.functional.test_equality import MODEL
from tests.gpu.random_models import random_model
from tests.prompt_rows import POOLINGS, VOCAB_SIZE, Reference, check_all, run

pytestmark = pytest.mark.extended

#: Longer than one chunk of logits, and than a step of few tokens; one has a single token.
LENGTHS = (1, 2, 17, 33, 90, 400)
BASE = {
    "parallel.executor": "inline", "parallel.cpu_threads": 1, "model.dtype": "float32",
    "cache.block_size": 16, "cache.num_blocks": 80,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Gemma 2 has windows, and caps its logits."""
    folder = tmp_path_factory.mktemp(request.param)
    random_model(folder, vocab_size=VOCAB_SIZE, family=request.param, eos_token_id=None)
    rng = np.random.default_rng(0)
    return Reference.of(folder, [rng.integers(3, VOCAB_SIZE, n).tolist() for n in LENGTHS])


@pytest.mark.parametrize("way", ["batch", "chunks", "cached"])
def test_every_way_gives_what_transformers_does(reference: Reference, way: str) -> None:
    settings: dict[str, Any] = {
        "batch": {},
        "chunks": {"scheduler.max_num_batched_tokens": 24},
        "cached": {"cache.num_blocks": 300},
    }[way]
    with LLM(str(reference.folder), settings=BASE | settings, progress=False) as llm:
        outputs = check_all(llm, reference)
        if way == "chunks":
            assert max(o.sequences[0].request.num_prefill_steps for o in outputs) > 9
        if way == "cached":
            outputs = check_all(llm, reference)
            cached = [output.num_cached_tokens for output in outputs[-6:]]
            # blocks of 16 before the last token, for the last token's state and for generation
            assert cached == [384, 0, 0, 0, 0, 384]


@pytest.mark.parametrize(
    ("reference", "ranks"), [("llama", 1), ("gemma2", 1), ("gemma2", 2)], indirect=["reference"]
)
def test_states_of_all_tokens(reference: Reference, ranks: int) -> None:
    """In chunks, beside generation, with the cache full of the same prompts, and preempted."""
    settings: dict[str, Any] = {"scheduler.max_num_batched_tokens": 24}
    if ranks > 1:
        settings |= {"parallel.executor": "multiprocess", "parallel.tensor_parallel_size": ranks}
    every, others = SamplingParams(pooling="all"), SamplingParams(temperature=0, max_tokens=90)
    with LLM(str(reference.folder), settings=BASE | settings, progress=False) as llm:
        growing = [(reference.prompts[3], others)] * 5
        requests = [(prompt, every) for prompt in reference.prompts]
        for outputs in (run(llm, [*growing, *requests]), run(llm, requests)):
            for number, output in enumerate(outputs[-len(requests) :]):
                expected = reference.states[number].numpy()
                assert output.pooled is not None
                assert output.pooled.shape == expected.shape
                assert np.abs(output.pooled - expected).max() < 1e-4 * np.abs(expected).max()
        with pytest.raises(RequestError, match="a vector for each token"):
            llm.embed("x", pooling="all")


def test_a_preempted_prompt_is_computed_anew(reference: Reference) -> None:
    """Requests before it keep growing at its cost, while few tokens of it are computed a step."""
    growing = SamplingParams(temperature=0, max_tokens=90)
    settings = {
        "cache.num_blocks": 40,
        "scheduler.max_num_batched_tokens": 24,
    }
    # as a server has it: a quarter of the budget beside decodes
    config = load_config(None, BASE | settings | {"model.path": str(reference.folder)})
    with LLM.of(config, progress=False) as llm:
        requests = [(prompt, growing) for prompt in [reference.prompts[2]] * 5]
        for pooling in (None, *POOLINGS):
            scored = SamplingParams(prompt_logprobs=2, temperature=0, max_tokens=3)
            wanted = scored if pooling is None else SamplingParams(pooling=pooling)
            llm.frontend.reset_prefix_cache()
            *_, output = run(llm, [*requests, (reference.prompts[-1], wanted)])
            assert output.sequences[0].request.num_preemptions
            if pooling is None:
                reference.check_scores(len(LENGTHS) - 1, output, 2)
            else:
                assert output.pooled is not None
                reference.check_pooled(len(LENGTHS) - 1, pooling, output.pooled)


@pytest.mark.parametrize("reference", ["gemma2"], indirect=True)
def test_two_ranks_give_what_transformers_does(reference: Reference) -> None:
    settings = {
        "parallel.executor": "multiprocess",
        "parallel.tensor_parallel_size": 2,
        "scheduler.max_num_batched_tokens": 48,
    }
    with LLM(str(reference.folder), settings=BASE | settings, progress=False) as llm:
        check_all(llm, reference)


def test_siblings_share_the_scores_of_their_prompt(reference: Reference) -> None:
    settings = {"scheduler.max_num_batched_tokens": 24, "cache.num_blocks": 40}
    params = SamplingParams(n=3, seed=5, max_tokens=6, prompt_logprobs=2)
    with LLM(str(reference.folder), settings=BASE | settings, progress=False) as llm:
        outputs = run(llm, [(prompt, params) for prompt in reference.prompts[3:]])
        for number, output in enumerate(outputs, 3):
            reference.check_scores(number, output, 2)
            assert [s.request.num_output for s in output.sequences] == [6, 6, 6]
            assert len({tuple(s.request.tokens[-6:]) for s in output.sequences}) == 3


def test_models_of_transformers_own(tmp_path: Path) -> None:
    """Cohere's logits are scaled by the model, outside of its head."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, logit_scale=0.25, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    CohereForCausalLM(config).save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 40, 130)]
    settings = {"model.tokenizer": "none", "scheduler.max_num_batched_tokens": 64}
    with LLM(str(tmp_path), settings=BASE | settings, progress=False) as llm:
        assert "transformers" in llm.frontend.engines[0].report.implementation
        check_all(llm, Reference.of(tmp_path, prompts))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[LLM, Reference]]:
    settings = BASE | {
        "model.quantization": "none",
        "cache.num_blocks": 128,
        "scheduler.max_num_batched_tokens": 64,
    }
    with LLM(MODEL, settings=settings, progress=False) as llm:
        assert llm.frontend.tokenizer is not None
        prompts = [llm.frontend.tokenizer.encode(text) for text in PROMPTS[:4]]
        folder = resolve_model(ModelConfig(path=MODEL, quantization="none"))
        yield llm, Reference.of(folder, prompts)


def test_real_weights(smollm2: tuple[LLM, Reference]) -> None:
    check_all(*smollm2)


def as_sentence_transformer(folder: Path) -> None:
    """Writes what sentence-transformers writes: mean pooling, not normalised, with prompts."""
    kind = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "\u0150\u0151", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def test_llm_embeds_as_the_folder_says(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = random_model(tmp_path, vocab_size=300, family="qwen3")
    as_sentence_transformer(folder)
    text, prompted = "\u0140\u0141\u0142", "\u0150\u0151\u0140\u0141\u0142"
    with LLM(str(folder), settings=BASE, progress=False) as llm:
        assert llm.frontend.tokenizer is not None
        ids = llm.frontend.tokenizer.encode(prompted)
        plain, other = llm.embed([text, prompted])
        (asked,) = llm.embed(text, prompt_name="query")
        (cut,) = llm.embed(text, dimensions=8, normalize=True)
        (similar,) = llm.score(text, [prompted])
        (scored,) = llm.generate(prompted, SamplingParams(max_tokens=2, prompt_logprobs=1))
        with pytest.raises(RequestError, match="prompt_name is 'web'"):
            llm.embed(text, prompt_name="web")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    assert np.allclose(asked, states.mean(0), atol=1e-4)
    assert np.allclose(asked, other, atol=1e-5)
    assert np.allclose(cut, plain[:8] / np.linalg.norm(plain[:8]), atol=1e-5)
    cosine = float(asked @ other) / float(np.linalg.norm(asked) * np.linalg.norm(other))
    assert math.isclose(similar, cosine, abs_tol=1e-4)
    assert scored.prompt_scores is not None
    assert len(scored.prompt_scores.logprobs) == len(ids) - 1
