"""Structured output by a real model behind a real socket: what was asked for is what comes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pydantic
import pytest

from aioinfer.errors import RequestError
from aioinfer.llm import LLM
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from tests.functional.conftest import SMOLLM2, Served, openai_client
from tests.random_schemas import random_schemas

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Name a city and its country."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20},
                   "country": {"enum": ["France", "Spain", "Italy"]},
                   "rank": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "country", "rank"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


@pytest.fixture(scope="module")
def served(speaking: Served) -> Served:
    return speaking


class City(pydantic.BaseModel):
    city: str
    country: str


@pytest.mark.sample
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": CITY}},
    ],
)
async def test_a_schema(served: Served, fields: dict[str, Any], temperature: float) -> None:
    reply = await served.post(
        CHAT, messages=QUESTION, max_tokens=100, temperature=temperature, seed=1, **fields
    )
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[A-Z]{3}-\d{2}"}}, r"[A-Z]{3}-\d{2}"),
        ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive|negative"),
        ({"grammar": 'root ::= "<" [a-z]{2,4} ">"'}, r"<[a-z]{2,4}>"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, r"x[0-9]{2}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ],
)
async def test_other_grammars(served: Served, fields: dict[str, Any], pattern: str) -> None:
    choice = await served.complete(prompt="Here:", max_tokens=30, temperature=1, seed=2, **fields)
    assert re.fullmatch(pattern, choice["text"], re.DOTALL), choice
    assert choice["finish_reason"] == "stop" or pattern == r"\{.*"


async def test_streams_of_several_choices(served: Served) -> None:
    events = await served.stream(
        CHAT, messages=QUESTION, n=3, max_tokens=100, temperature=1, seed=3, response_format=FORMAT
    )
    texts = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)


async def test_stop_and_length_go_before_the_grammar(served: Served) -> None:
    fields = {"prompt": "Digits:", "structured_outputs": {"regex": "a{40}"}, "temperature": 0}
    short = await served.complete(max_tokens=3, **fields)
    assert short["finish_reason"] == "length"
    assert re.fullmatch("a+", short["text"])
    stopped = await served.complete(max_tokens=30, stop="aaaaa", **fields)
    assert stopped["finish_reason"] == "stop"
    assert "aaaaa" not in stopped["text"]


async def test_restricted_and_plain_requests_together(served: Served) -> None:
    """More of them than there are slots; the plain ones say what they say alone."""
    plain = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    alone = await served.complete(**plain)
    work = [
        served.complete(prompt=f"{i}:", max_tokens=60, temperature=1, seed=i, json_schema=CITY)
        if i % 2
        else served.complete(**plain)
        for i in range(10)
    ]
    for index, choice in enumerate(await asyncio.gather(*work)):
        if index % 2:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["text"]), CITY)
        else:
            assert choice["text"] == alone["text"]


async def test_allowed_tokens_and_bad_words(served: Served) -> None:
    tokens = (await served.post("/tokenize", prompt=" yes no"))["tokens"]
    choice = await served.complete(
        prompt="Is it so?", allowed_token_ids=tokens, max_tokens=6, return_token_ids=True
    )
    assert len(choice["token_ids"]) == 6
    assert set(choice["token_ids"]) <= set(tokens)
    fields = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert "Paris" in (await served.complete(**fields))["text"]
    without = await served.complete(bad_words=["Paris"], **fields)
    assert "Paris" not in without["text"]


async def test_a_grammar_that_fails_while_it_runs(served: Served) -> None:
    """It ends that request with an error, and no other."""
    other = asyncio.create_task(served.complete(prompt="One, two,", max_tokens=40, temperature=0))
    tokens = (await served.post("/tokenize", prompt="xyz"))["tokens"]
    async with served.http.post(
        COMPLETIONS,
        json={
            "prompt": "x",
            "structured_outputs": {"regex": "abc"},
            "allowed_token_ids": tokens,
            "max_tokens": 9,
        },
    ) as response:
        assert response.status == 400
        assert "no token may come next" in (await response.json())["error"]["message"]
    assert (await other)["finish_reason"] == "length"


@pytest.mark.sample
async def test_the_openai_client_parses(served: Served) -> None:
    async with openai_client(served) as client:
        reply = await client.chat.completions.parse(
            model="smollm2", messages=QUESTION, response_format=City, max_tokens=200, temperature=0
        )
        parsed = reply.choices[0].message.parsed
        assert isinstance(parsed, City)


async def test_random_schemas(served: Served) -> None:
    """Every answer that ended by itself parses and validates."""

    async def is_valid(number: int, schema: Any) -> bool:
        async with served.http.post(
            COMPLETIONS,
            json={"prompt": "An example:", "max_tokens": 120, "json_schema": schema,
                  "temperature": number % 2, "seed": number},
        ) as response:  # fmt: skip
            reply = await response.json()
        if response.status == 400:
            assert reply["error"]["param"] == "json_schema"
            return False
        assert response.status == 200, reply
        (choice,) = reply["choices"]
        if choice["finish_reason"] != "stop":
            return False
        jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))
        return True

    found = await asyncio.gather(*map(is_valid, range(12), random_schemas(12, start=5)))
    assert sum(found) >= 4


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"const": 9007199254740993}', "cannot be enforced exactly"),
        ('{"const": -9223372036854775808}', "cannot be enforced exactly"),
        ('{"minimum": 12345678901234567890}', "beyond 2^63"),
        ('{"pattern": "\\ud800"}', "surrogate pair"),
        ('{"const": ' + "[" * 130 + "]" * 130 + "}", "at most 50 levels"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, ""),
    ],
)
async def test_a_schema_that_cannot_be_enforced(served: Served, schema: str, message: str) -> None:
    """It is answered 400; llguidance by itself would round the number, or end the process."""
    for fields in (f'"structured_outputs": {{"json": {schema}}}', f'"json_schema": {schema}'):
        body = f'{{"prompt": "x", "max_tokens": 5, {fields}}}'
        async with served.http.post(
            COMPLETIONS, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400
            assert message in (await response.json())["error"]["message"]


async def test_a_deep_schema(served: Served) -> None:
    """More levels than llguidance's parser of JSON takes."""
    schema: dict[str, Any] = {"const": "x"}
    for _ in range(60):
        schema = {"type": "array", "prefixItems": [schema], "minItems": 1, "items": False}
    schema = {"properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    fields = {"json": {"type": "object"} | schema, "disable_any_whitespace": True}
    choice = await served.complete(prompt="x", max_tokens=200, structured_outputs=fields)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), schema)


async def test_offline() -> None:
    def generate() -> None:
        with LLM(SMOLLM2, settings={"cache.num_blocks": 100}, progress=False) as llm:
            grammar = GrammarSpec("json_schema", json.dumps(CITY))
            plain, city = llm.generate(
                ["One, two,", "A city:"],
                [SamplingParams(max_tokens=5), SamplingParams(max_tokens=100, grammar=grammar)],
            )
            assert len(plain.token_ids) == 5
            jsonschema.validate(json.loads(city.text), CITY)
            wrong = SamplingParams(grammar=GrammarSpec("json_schema", '{"not": {"pattern": "a"}}'))
            with pytest.raises(RequestError, match="'not' is not supported"):
                llm.generate("x", wrong)

    await asyncio.to_thread(generate)
