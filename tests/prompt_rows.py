"""What prompt rows should give, by transformers, and requests of all kinds of them in one batch;
for tests on CPUs and GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from aioinfer.engine.output import RequestOutput

VOCAB_SIZE = 509  # two ranks do not divide it
POOLINGS = ("last", "mean", "cls")


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
        # other implementations may leave out what caps the scores
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
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
