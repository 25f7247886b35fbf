"""scripts/bench_large_bodies.py: its bodies are what they are said to be, and a short run over a
real server."""

from __future__ import annotations

import pytest

import bench_large_bodies
from aioinfer.api.context import MAX_BYTES
from aioinfer.api.decoding import Body, decode_large
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.completions import CompletionRequest
from aioinfer.api.openai.tokenization import DetokenizeRequest
from aioinfer.errors import RequestError
from benchlib.large_bodies import CHAT, COMPLETIONS, LONG_TEXTS, MANY_VALUES, TOO_MANY, LargeBody

pytestmark = pytest.mark.slow

KINDS: dict[str, type[Body]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.mark.parametrize("body", TOO_MANY, ids=lambda body: body.name)
def test_bodies_with_too_many_values_are_declined(body: LargeBody) -> None:
    with pytest.raises(RequestError, match="may hold at most"):
        decode_large(body.make(), KINDS[body.path])


@pytest.mark.parametrize("body", MANY_VALUES, ids=lambda body: body.name)
def test_bodies_just_under_the_bound_are_decoded(body: LargeBody) -> None:
    if "response_format" in body.name:
        pytest.skip("what it may hold is checked as well")
    decode_large(body.make(), KINDS[body.path])


def test_long_texts_are_just_under_the_largest_body() -> None:
    longest = max(len(body.make()) for body in LONG_TEXTS[:3])
    assert 0.9 < longest / MAX_BYTES < 1


@pytest.mark.extended
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    name = "49 900 values in an ignored field"
    bench_large_bodies.main(["--runs", "1", "--tail", "0", "--only", name])
    shown = capsys.readouterr()
    assert "(idle)" in shown.out
    assert name in shown.out
    assert f"run 1: {name}: 200" in shown.err
