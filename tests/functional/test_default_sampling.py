"""Default sampling from the configuration, for offline use and over HTTP alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aioinfer.errors import RequestError
from aioinfer.llm import LLM
from aioinfer.sampling_params import SamplingParams
from tests.functional.conftest import SMOLLM2, serve

PROMPT = "The capital of France is"
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "max_tokens": 6}
SETTINGS: dict[str, Any] = {
    "model.path": SMOLLM2, "model.max_model_len": 256, "cache.num_blocks": 40,
    "parallel.executor": "inline", "parallel.cpu_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    configured = {f"model.sampling.{name}": value for name, value in SAMPLING.items()}
    with LLM(settings=SETTINGS | configured, progress=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_blocks() -> None:
    """`LLM` waits for its event loop, which is in a thread of its own."""


def test_generate_without_parameters_takes_the_configured_ones(llm: LLM) -> None:
    defaults = llm.frontend.defaults.sampling_params()
    assert (defaults.temperature, defaults.top_k) == (pytest.approx(0.7), 5)
    (output,) = llm.generate(PROMPT)
    assert len(output.token_ids) <= 6
    given = SamplingParams(**SAMPLING, seed=11)
    seeded = llm.frontend.defaults.sampling_params(seed=11)
    assert llm.generate(PROMPT, seeded)[0].token_ids == llm.generate(PROMPT, given)[0].token_ids


def test_parameters_that_are_given_go_before_the_configured_ones(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], greedy)
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 9
    unbounded = SamplingParams(temperature=0, ignore_eos=True)
    (default_length,) = llm.generate(PROMPT, unbounded)
    assert default_length.token_ids == first.token_ids[:6]


@pytest.mark.extended
async def test_http_has_the_same_defaults() -> None:
    async with serve(
        **{f"model__sampling__{name}": value for name, value in SAMPLING.items()}
    ) as served:
        for path, prompt in (
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ):
            body = {**prompt, "seed": 3, "ignore_eos": True}
            default = await served.post(path, **body)
            explicit = await served.post(path, **body, **SAMPLING)
            assert default["choices"] == explicit["choices"]
            assert default["usage"]["completion_tokens"] == 6
            other = await served.post(path, **body, temperature=0, max_tokens=7)
            assert other["usage"]["completion_tokens"] == 7


def test_offline_use_without_a_tokenizer() -> None:
    with LLM(settings=SETTINGS | {"model.tokenizer": "none"}, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.generate([[504, 3575, 282, 4649, 314]], params)
        assert (output.text, len(output.token_ids)) == ("", 4)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate(PROMPT, params)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "Hello."}], params)
