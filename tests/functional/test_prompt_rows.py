"""Outputs of prompt rows equal those of transformers in float32: log-probabilities of the prompt's
tokens, and pooled hidden states, under every way of getting there."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig
from aioinfer.engine.output import RequestOutput
from aioinfer.errors import RequestError
from tests.functional.prompts import PROMPTS
from tests.functional.test_equality import MODEL
from tests.gpu.random_models import random_model

VOCAB_SIZE = 509  # two ranks do not divide it
POOLINGS = ("last", "mean", "cls")
#: Longer than one chunk of logits, and than a step of few tokens; one has a single token.
LENGTHS = (1, 2, 17, 33, 90, 400)
BASE = {
    "parallel.executor": "inline",
    "parallel.cpu_threads": 1,
    "model.dtype": "float32",
    "cache.block_size": 16,
    "cache.num_blocks": 80,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A model, prompts, and what transformers makes of them: the log-probabilities of all tokens
    behind each token, and the hidden states after the last norm."""

    folder: Path
    prompts: list[list[int]]
    logprobs: list[torch.Tensor]
    states: list[torch.Tensor]

    @classmethod
    def of(cls, folder: Path, prompts: list[list[int]]) -> Reference:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logprobs, states = [], []
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([prompt])
                logprobs.append(model(ids).logits[0].log_softmax(-1))
                states.append(model.base_model(ids).last_hidden_state[0])
        return cls(folder, prompts, logprobs, states)

    def pooled(self, number: int, pooling: str) -> np.ndarray:
        states = self.states[number]
        found = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}
        return found[pooling].numpy()

    def check_pooled(self, number: int, pooling: str, found: np.ndarray) -> None:
        expected = self.pooled(number, pooling)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()

    def check_scores(self, number: int, output: RequestOutput, num_top: int) -> None:
        scores, prompt = output.prompt_scores, self.prompts[number]
        assert scores is not None
        assert scores.is_done
        expected, targets = self.logprobs[number][:-1], torch.tensor(prompt[1:])
        own = expected.gather(1, targets[:, None])
        assert np.allclose(scores.logprobs, own[:, 0], atol=2e-3)
        best = expected.sort(dim=1, descending=True)
        assert scores.top_logprobs.shape == (len(prompt) - 1, num_top)
        assert np.allclose(scores.top_logprobs, best.values[:, :num_top], atol=2e-3)
        # two tokens that are nearly as likely may change places
        lowest = best.values[:, num_top - 1 : num_top] - 2e-3
        tops = torch.from_numpy(scores.top_tokens.astype(np.int64))
        assert (expected.gather(1, tops) >= lowest).all()
        bounds = [(expected > own + delta).sum(1).numpy() + 1 for delta in (2e-3, -2e-3)]
        assert (bounds[0] <= scores.ranks).all()
        assert (scores.ranks <= bounds[1]).all()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Gemma 2 has windows, and caps its logits."""
    folder = tmp_path_factory.mktemp(request.param)
    random_model(folder, vocab_size=VOCAB_SIZE, family=request.param, eos_token_id=None)
    rng = np.random.default_rng(0)
    return Reference.of(folder, [rng.integers(3, VOCAB_SIZE, n).tolist() for n in LENGTHS])


def run(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Submits requests together and returns their outputs when all have ended."""

    async def collect(output: RequestOutput) -> RequestOutput:
        async for _ in output:
            pass
        return output

    async def submit_all() -> list[RequestOutput]:
        outputs = [await llm.frontend.submit(prompt, params) for prompt, params in requests]
        return list(await asyncio.gather(*map(collect, outputs)))

    outputs = llm.run(submit_all())
    llm.frontend.engines[0].scheduler.check_integrity()
    return outputs


def check_all(llm: LLM, reference: Reference) -> list[RequestOutput]:
    """Scores, pools and generates, all in one batch."""
    requests: list[tuple[list[int], SamplingParams]] = []
    for prompt in reference.prompts:
        requests += [(prompt, SamplingParams(pooling=pooling)) for pooling in POOLINGS]
        requests.append((prompt, SamplingParams(prompt_logprobs=3, temperature=0, max_tokens=4)))
        requests.append((prompt, SamplingParams(prompt_logprobs=1, prompt_only=True)))
        requests.append((prompt, SamplingParams(temperature=0, max_tokens=9)))
    outputs = run(llm, requests)
    for number in range(len(reference.prompts)):
        mine = outputs[6 * number : 6 * number + 6]
        for output, pooling in zip(mine, POOLINGS, strict=False):
            assert output.pooled is not None
            reference.check_pooled(number, pooling, output.pooled)
            assert (output.num_generated, output.prompt_scores) == (0, None)
        reference.check_scores(number, mine[3], 3)
        reference.check_scores(number, mine[4], 1)
        assert [output.num_generated for output in mine[3:]] == [4, 0, 9]
        assert mine[5].prompt_scores is None
        shared, alone = (o.sequences[0].request.tokens.tolist() for o in (mine[3], mine[5]))
        assert shared == alone[: len(shared)]
    return outputs


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


@pytest.mark.parametrize("pooling", [None, *POOLINGS])
def test_a_preempted_prompt_is_computed_anew(reference: Reference, pooling: str | None) -> None:
    """Requests before it keep growing at its cost, while few tokens of it are computed a step."""
    growing = SamplingParams(temperature=0, max_tokens=90)
    if pooling is None:
        wanted = SamplingParams(prompt_logprobs=2, temperature=0, max_tokens=3)
    else:
        wanted = SamplingParams(pooling=pooling)
    settings = {
        "cache.num_blocks": 40,
        "scheduler.max_num_batched_tokens": 24,
        "scheduler.max_prefill_tokens_beside_decode": 6,
    }
    with LLM(str(reference.folder), settings=BASE | settings, progress=False) as llm:
        requests = [(prompt, growing) for prompt in [reference.prompts[2]] * 5]
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
    settings = {"model.skip_tokenizer": True, "scheduler.max_num_batched_tokens": 64}
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
