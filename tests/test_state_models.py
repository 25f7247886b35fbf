"""Models whose layers keep something else than all keys and values (states, windows, latents), or
read the KV cache of others, served: greedy texts are those of transformers, in float32, with chunks
of odd lengths, prefix hits, preemption, forks, and over two ranks or stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aioinfer.llm import LLM, Output
from aioinfer.sampling_params import SamplingParams
from tests.test_models import GEMMA4_31B, GEMMA4_EXPERTS, NEMOTRON_EXPERTS, reference_model
from tests.tiny_models import tiny_model
from tests.worker_extension import has_compiler

OUTPUT = 12
#: Tokens that show whether the ranks' states, or those of a hit, are right: one from the prompt's
#: last chunk, and two from decodes, of which the second one reads what the first one wrote.
FEW = 3
CHUNK = 37
#: Lengths around blocks of 16 tokens, and chunks.
LENGTHS = (1, 2, 15, 16, 17, 33, 37, 48, 49, 63, 64, 65, 95)
SETTINGS: dict[str, Any] = {
    "parallel.executor": "inline", "parallel.device": "cpu", "model.dtype": "float32",
    "model.tokenizer": "none", "cache.block_size": 16, "cache.num_blocks": 60,
    "scheduler.max_num_seqs": 4, "scheduler.max_num_batched_tokens": CHUNK,
}  # fmt: skip
WITHOUT_CACHE = {"cache.enable_prefix_caching": False}
TWO = {"parallel.executor": "multiprocess"}


class Case(NamedTuple):
    """`apart`: prompts of 63 tokens that share nothing, and their texts."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    apart: list[tuple[list[int], list[int]]]


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5 experts": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "kimi_linear": ("kimi_linear", {}),
    "falcon_h1": ("falcon_h1", {}),
    "bamba": ("bamba", {}),
    "granite": ("granitemoehybrid", {}),
    "granite experts": ("granitemoehybrid", EXPERTS),
    "nemotron": ("nemotron_h", {}),
    "nemotron experts": ("nemotron_h", NEMOTRON_EXPERTS),
    "nemotron experts of latents": ("nemotron_h", {**NEMOTRON_EXPERTS, "moe_latent_size": 24}),
    # groups of two head sizes, windows, and layers that read the cache of others
    "gemma4": ("gemma4_text", {}),
    "gemma4 31B": ("gemma4_text", GEMMA4_31B),
    "gemma4 26B": ("gemma4_text", GEMMA4_31B | GEMMA4_EXPERTS),
    "gemma3n": ("gemma3n_text", {}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 13,
                          "num_hidden_layers": 4, "max_window_layers": 2}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}  # fmt: skip

EXTENDED = (
    "deepseek", "qwen3_5 experts", "qwen3_next", "lfm2_moe", "granite", "nemotron", "gemma4 31B",
    "gemma4 26B",
)  # fmt: skip

#: One model with each kind of mixer.
KINDS = (
    "qwen3_5", "lfm2", "kimi_linear", "falcon_h1", "bamba", "nemotron", "gemma4", "gemma3n",
    "windows",
)  # fmt: skip
#: One of each kind of state (Bamba's is Falcon's, in layers apart as Qwen3.5's), and of each kind
#: of shared keys. Kimi-Linear's attention keeps latent vectors, which float8 is refused for.
STATES_BESIDE_KEYS = ("qwen3_5", "lfm2_moe", "falcon_h1", "gemma4", "gemma3n")


def params() -> Iterator[Any]:
    """Yields the cases; those of latents, and those that have the parts of others, are extended."""
    for name in CASES:
        marks = [pytest.mark.extended] if name.startswith(EXTENDED) else []
        yield pytest.param(name, marks=marks)


@pytest.fixture(scope="module")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes each case once, whatever lists of them tests have."""
    return cache(lambda name: _make_case(name, tmp_path_factory.mktemp("model")))


@pytest.fixture(params=params())
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


def _make_case(name: str, folder: Path) -> Case:
    family, fields = CASES[name]
    tiny_model(family, folder, **fields)
    rng, model = random.Random(5), reference_model(folder)
    prompts = prefixes(rng)
    others = [[rng.randrange(3, 500) for _ in range(63)] for _ in range(3)]
    with LLM(str(folder), settings=SETTINGS | WITHOUT_CACHE, progress=False) as llm:
        texts, cached = generate(llm, [*prompts, *others])
    assert cached == 0
    for prompt, text in zip([*prompts, *others], texts, strict=True):
        assert text == likeliest(model, prompt, text)
    apart = list(zip(others, texts[len(prompts) :], strict=True))
    return Case(folder, prompts, texts[: len(prompts)], apart)


def prefixes(rng: random.Random) -> list[list[int]]:
    """Returns the beginnings of a text, of all lengths."""
    text = [rng.randrange(3, 500) for _ in range(max(LENGTHS))]
    return [text[:length] for length in LENGTHS]


@torch.inference_mode()
def likeliest(model: Any, prompt: list[int], text: list[int]) -> list[int]:
    """Returns the likeliest token of transformers behind the prompt and each of a text's tokens but
    the last. If these are the text, transformers continues the prompt in the same way: this takes
    one step of it instead of one for each token."""
    logits = model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(-1)]


def greedy(max_tokens: int = OUTPUT, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def generate(
    llm: LLM, prompts: list[list[int]], max_tokens: int = OUTPUT
) -> tuple[list[list[int]], int]:
    """Returns the texts, and how many prompt tokens were found in the prefix cache."""
    outputs = llm.generate(prompts, greedy(max_tokens=max_tokens))
    return [list(output.token_ids) for output in outputs], sum(
        output.num_cached_tokens for output in outputs
    )


def test_prefix_hits_and_forks(case: Case) -> None:
    with LLM(str(case.folder), settings=SETTINGS, progress=False) as llm:
        for _ in range(2):
            texts, cached = generate(llm, case.prompts)
            assert texts == case.expected
            assert cached > 0.4 * sum(LENGTHS)
        # turns of a conversation: the text goes on behind an answer
        turn = case.prompts[-1] + case.expected[-1]
        (answer,), _ = generate(llm, [turn])
        assert answer == likeliest(reference_model(case.folder), turn, answer)
        four = llm.generate([turn], greedy(n=4))[0]
        assert [list(one.token_ids) for one in four.completions] == [answer] * 4


@pytest.mark.extended
@pytest.mark.parametrize("case", [*KINDS, "deepseek_v3"], indirect=True)
def test_hits_of_every_length_modulo_a_chunk(case: Case) -> None:
    """A prompt of each length goes on from what a longer one has left, as it did from nothing,
    with and without a seed; every fourth one in four sequences. Each length of the rest behind a
    hit is that of a chunk's part. Every third one goes on once more, from its own end, with each
    combination of the others."""
    text = case.prompts[-1]
    lengths = range(len(text) - CHUNK, len(text))
    asked = [text[:length] for length in lengths]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8)[number % 2], seed=number, max_tokens=FEW, ignore_eos=True,
            n=1 if number % 4 else 4,
        )
        for number in range(len(asked))
    ]  # fmt: skip

    def texts_of(output: Output) -> list[list[int]]:
        return [list(each.token_ids) for each in output.completions]

    with LLM(str(case.folder), settings=SETTINGS | WITHOUT_CACHE, progress=False) as llm:
        cold = [texts_of(output) for output in llm.generate(asked, params)]
        model = reference_model(case.folder)
        for prompt, (first, *_) in list(zip(asked, cold, strict=True))[::2]:
            assert first == likeliest(model, prompt, first)
    with LLM(str(case.folder), settings=SETTINGS, progress=False) as llm:
        llm.generate([text], greedy())
        rests = set()
        for number, (prompt, each, expected) in enumerate(zip(asked, params, cold, strict=True)):
            for _ in range(1 if number % 3 else 2):
                (output,) = llm.generate([prompt], each)
                cached = output.num_cached_tokens
                assert texts_of(output) == expected, (len(prompt), cached)
            rests.add((len(prompt) - cached) % CHUNK)
            assert cached > 0
        assert len(rests) >= 16
        llm.frontend.engines[0].scheduler.check_integrity()


def test_preemption(case: Case) -> None:
    """Blocks for the prompts of two requests, but not for their texts."""
    few = SETTINGS | {"cache.num_blocks": 9, "scheduler.max_num_batched_tokens": 200}
    prompts, expected = zip(*case.apart, strict=True)
    with LLM(str(case.folder), settings=few, progress=False) as llm:
        assert generate(llm, list(prompts))[0] == list(expected)
        assert llm.frontend.engines[0].scheduler.stats.preemptions > 0


#: Both ways of each kind, and of the other models one.
RANKS = [
    *((name, kind) for name in KINDS for kind in ("tensor", "pipeline")),
    *((name, ("tensor", "pipeline")[number % 2])
      for number, name in enumerate(name for name in CASES if name not in KINDS)),
]  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(("case", "kind"), RANKS, indirect=["case"])
def test_two_ranks(case: Case, kind: str) -> None:
    two = SETTINGS | TWO | {f"parallel.{kind}_parallel_size": 2}
    with LLM(str(case.folder), settings=two, progress=False) as llm:
        for _ in range(2):
            texts, _ = generate(llm, case.prompts, FEW)
            assert texts == [text[:FEW] for text in case.expected]
        assert llm.collective_rpc(has_compiler) == [False, False]


@pytest.mark.parametrize("name", STATES_BESIDE_KEYS)
def test_keys_in_float8_beside_states(name: str, tmp_path: Path) -> None:
    """Prefix hits give what a cold run gives."""
    family, fields = CASES[name]
    folder = str(tiny_model(family, tmp_path, **fields))
    narrow, prompts = SETTINGS | {"cache.dtype": "fp8"}, prefixes(random.Random(5))
    with LLM(folder, settings=narrow, progress=False) as llm:
        (first, _), (second, cached) = (generate(llm, prompts) for _ in range(2))
    assert cached > 0.4 * sum(LENGTHS)
    with LLM(folder, settings=narrow | WITHOUT_CACHE, progress=False) as llm:
        cold, _ = generate(llm, prompts)
    assert first == second == cold
