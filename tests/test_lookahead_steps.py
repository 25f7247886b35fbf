"""Steps with lookahead rows on a CPU: whatever the drafts are, each request gets the text of a run
without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.features import ProposalRows
from tests.filled_slots import assert_fits
from tests.scheduled_worker import (
    GREEDY,
    NEW_TOKENS,
    KnownDrafts,
    RandomLookahead,
    expected_outputs,
    generate,
    prompts_that_begin_alike,
)
from tests.tiny_models import tiny_model

#: Families with a cache of keys and values, with sliding windows beside it, and with latents.
FAMILIES = ("llama", "gemma3", "deepseek_v3")
#: Families with a state: the gated delta rule, Kimi delta attention, Mamba-2 before and beside
#: attention, and short convolutions alone.
STATE_FAMILIES = ("qwen3_5_text", "kimi_linear", "bamba", "falcon_h1", "lfm2")
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, frequency_penalty=0.6, presence_penalty=0.4, top_p=0.9),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 11: -50.0}),
)


@pytest.mark.parametrize(
    ("family", "most"),
    [
        *zip(FAMILIES, (4, 4, 1), strict=True),
        *zip(STATE_FAMILIES, (4, 1, 4, 1, 4), strict=True),
    ],
)
def test_drafts_do_not_change_the_text(family: str, most: int, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, vocab_size=200)
    prompts = prompts_that_begin_alike(12)
    plain, _ = generate(folder, prompts, params=PARAMS)
    assert plain[::6] == expected_outputs(folder, prompts[::6])
    assert len({tuple(output) for output in plain}) == len(prompts)
    texts = [prompt + output for prompt, output in zip(prompts, plain, strict=True)]
    ahead = RandomLookahead(most)
    outputs, _ = generate(folder, prompts, params=PARAMS, ahead=ahead, texts=texts)
    assert outputs == plain
    assert ahead.num_rows > ahead.num_kept > len(prompts) * NEW_TOKENS // 8


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "qwen3_5_text", "lfm2"),
        *(pytest.param(name, marks=pytest.mark.extended) for name in STATE_FAMILIES[1:4]),
    ],
)
def test_siblings_chunks_and_preemption(family: str, tmp_path: Path) -> None:
    """Several sequences a prompt, prompts in chunks beside lookahead rows, and too few blocks."""
    folder = tiny_model(family, tmp_path, vocab_size=200)
    prompts = prompts_that_begin_alike(5)
    plain, _ = generate(folder, prompts, n=3, params=PARAMS)
    longer = [prompt for prompt in prompts for _ in range(3)]
    texts = [prompt + output for prompt, output in zip(longer, plain, strict=True)]
    ahead = RandomLookahead(3)
    outputs, scheduler = generate(
        folder, prompts, n=3, budget=13, num_blocks=60, params=PARAMS, ahead=ahead, texts=texts
    )
    assert outputs == plain
    assert scheduler.stats.preemptions > 1
    assert ahead.num_kept > 50


def test_sampled_tokens_have_the_distribution_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are always one token, whatever is sampled: it is not sampled more often for that, nor
    is any other. How often each token is expected is the sum of its probabilities behind all
    sampled texts; Pearson's statistic is then no larger than that of equal probabilities."""
    vocab, draft, seeds = 24, 7, 100
    params = SamplingParams(temperature=1.5, logit_bias={draft: 2.0})

    def propose(self: KnownDrafts, rows: ProposalRows) -> None:
        for slot, base, offset in zip(*(each.tolist() for each in rows), strict=True):
            if offset:
                self.rank.slots.tokens[slot, base + offset] = draft

    monkeypatch.setattr(KnownDrafts, "propose", propose)
    folder, prompt = tiny_model("llama", tmp_path, vocab_size=vocab), [5, 9, 3, 1]
    ahead = RandomLookahead(3)
    outputs, _ = generate(folder, [prompt], n=seeds, params=[params], ahead=ahead)
    assert ahead.num_rows > ahead.num_kept > 200
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        texts = torch.tensor([prompt + output[:-1] for output in outputs])
        logits = model(texts).logits[:, len(prompt) - 1 :]
        logits[..., draft] += 2.0
    expected = (logits / params.temperature).softmax(-1).sum((0, 1)).numpy()
    observed = torch.tensor(outputs).flatten().bincount(minlength=vocab).numpy()
    assert observed.sum() == seeds * NEW_TOKENS
    assert_fits(observed, expected)
