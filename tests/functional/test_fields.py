"""Fields of completions and chats beyond the basic ones, over a socket: each does what it says,
and what would change the answer and is not supported is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import tokenizers
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params

from aioinfer.api.admin.control import AbortRequest
from aioinfer.api.admin.openapi import EXAMPLES
from aioinfer.api.anthropic import CountTokensRequest, MessagesRequest
from aioinfer.api.batch.batches import CreateBatch
from aioinfer.api.decoding import Body
from aioinfer.api.fields import NO_EFFECT, REFUSED
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.completions import CompletionRequest
from aioinfer.api.openai.pooling import EmbeddingRequest
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.api.openai.scoring import RerankedText, RerankRequest
from aioinfer.api.routes import ROUTES
from aioinfer.errors import GenerationError, RequestError
from aioinfer.features.speculation.costs import RowTimes
from aioinfer.sampling_params import SamplingParams
from document_keys import supported_fields
from tests.functional.conftest import Served, serve
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


class TestSampling:
    async def test_best_of_returns_the_likeliest_in_order(self, served: Served) -> None:
        body = {"prompt": PROMPT, "seed": 5, "temperature": 1.3, "max_tokens": 6, "logprobs": 0}
        everyone = (await served.post(COMPLETIONS, n=5, **body))["choices"]

        def mean(choice: dict[str, Any]) -> float:
            found = choice["logprobs"]["token_logprobs"]
            return sum(found) / len(found)

        ranked = sorted(everyone, key=mean, reverse=True)
        reply = await served.post(COMPLETIONS, n=2, best_of=5, **body)
        best = reply["choices"]
        assert len({choice["text"] for choice in everyone}) > 2
        assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
        assert [choice["index"] for choice in best] == [0, 1]
        assert reply["usage"]["completion_tokens"] == sum(
            len(choice["logprobs"]["tokens"]) for choice in everyone
        )
        two = [PROMPT, "Water boils at"]
        plain = await served.post(
            COMPLETIONS, **body | {"prompt": two, "logprobs": None}, best_of=3
        )
        assert [choice["index"] for choice in plain["choices"]] == [0, 1]
        assert [choice["logprobs"] for choice in plain["choices"]] == [None, None]

    async def test_a_bias(self, served: Served) -> None:
        (token,) = await served.frontend.encode(" cheese")
        bias = {str(token): 100, "7": -1}
        choice = await served.complete(prompt=PROMPT, temperature=0, max_tokens=3, logit_bias=bias)
        assert choice["text"] == " cheese cheese cheese"
        reply = await served.post(CHAT, messages=QUESTION, **GREEDY, logit_bias=bias)
        assert reply["choices"][0]["message"]["content"] == " cheese" * 8

    async def test_a_length_under_another_name(self, served: Served) -> None:
        for names in ({"n_predict": 3}, {"n_predict": 9, "max_tokens": 3}):
            reply = await served.post(COMPLETIONS, prompt=PROMPT, **names)
            assert reply["usage"]["completion_tokens"] == 3
        body = {"prompt": "x", "n_predict": -1, "logit_bias": {"5": 100}, "temperature": 0}
        reply = await served.post(COMPLETIONS, **body | {"prompt": [5] * 480})
        assert reply["usage"]["completion_tokens"] == 32
        await served.post(CHAT, 400, messages=QUESTION, n_predict=0)

    async def test_an_echo_alone(self, served: Served) -> None:
        reply = await served.post(
            COMPLETIONS, prompt=[PROMPT, "x"], echo=True, max_tokens=0, n=2, return_token_ids=True
        )
        assert [choice["text"] for choice in reply["choices"]] == [PROMPT, PROMPT, "x", "x"]
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["choices"][0]["token_ids"] == []
        assert reply["usage"]["completion_tokens"] == 0
        for wrong in ({"prompt": ""}, {"prompt": [99_999]}, {"temperature": -1}, {"echo": False}):
            await served.post(
                COMPLETIONS, 400, **{"prompt": "x", "echo": True, "max_tokens": 0} | wrong
            )


class TestPrompts:
    async def test_truncation_keeps_the_end(self, served: Served) -> None:
        text = "one two three four five six seven eight " * 200
        ids = await served.frontend.encode(text, max_tokens=10_000)
        for kept, expected in ((5, 5), (-1, 512 - 8)):
            reply = await served.post(
                COMPLETIONS, prompt=text, truncate_prompt_tokens=kept, return_token_ids=True,
                **GREEDY,
            )  # fmt: skip
            assert reply["choices"][0]["prompt_token_ids"] == ids[-expected:]
        only = {"echo": True, "max_tokens": 0, "return_token_ids": True}
        choice = await served.complete(prompt=text, truncate_prompt_tokens=-1, **only)
        assert choice["prompt_token_ids"] == ids[-512:]
        choice = await served.complete(prompt=text, truncate_prompt_tokens=2, echo=True, **GREEDY)
        assert choice["text"].startswith(served.frontend.tokenizer.decode(ids[-2:], False))
        reply = await served.post(
            CHAT, messages=QUESTION, truncate_prompt_tokens=4, return_token_ids=True, **GREEDY
        )
        assert reply["prompt_token_ids"] == (await served.frontend.encode_chat(QUESTION))[-4:]
        for body in ({"prompt": ids[:9]}, {"prompt": ids[:9], "truncation_side": "left"}):
            body |= {"truncate_prompt_tokens": 4, "return_token_ids": True}
            reply = await served.post(COMPLETIONS, **body, **GREEDY)
            assert reply["choices"][0]["prompt_token_ids"] == ids[5:9]
            reply = await served.post(COMPLETIONS, **body | {"truncation_side": "right"}, **GREEDY)
            assert reply["choices"][0]["prompt_token_ids"] == ids[:4]
        reply = await served.post(COMPLETIONS, 400, prompt=text, truncate_prompt_tokens=513)
        assert reply["error"]["param"] == "truncate_prompt_tokens"

    async def test_salts_keep_the_prefix_cache_apart(self, served: Served) -> None:
        prompt = "A salted hash table maps keys to values. " * 12

        async def cached(**fields: Any) -> int:
            reply = await served.post(COMPLETIONS, prompt=prompt, **GREEDY, **fields)
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached() == 0
        assert await cached() > 48
        assert await cached(cache_salt="a") == 0
        assert await cached(cache_salt="a") > 48
        assert await cached(cache_salt="b") == 0
        chat = {"messages": [{"role": "user", "content": prompt}], **GREEDY}
        await served.post(CHAT, **chat)
        reply = await served.post(CHAT, **chat, cache_salt="c")
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    async def test_a_suffix_needs_tokens_for_it(self, served: Served) -> None:
        reply = await served.post(COMPLETIONS, 400, prompt="def f(", suffix="return 1")
        assert reply["error"]["param"] == "suffix"
        assert "fills in the middle" in reply["error"]["message"]

    async def test_template_variables(self, served: Served) -> None:
        template = served.frontend.tokenizer._chat_template
        seen: list[Any] = []
        render = template.render

        def record(*args: Any, template_kwargs: Any, **options: Any) -> str:
            seen.append(template_kwargs)
            return render(*args, template_kwargs=template_kwargs, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(template, "render", record)
            await served.post(CHAT, messages=QUESTION, **GREEDY, reasoning_effort="low")
            await served.post(
                CHAT, messages=QUESTION, **GREEDY, chat_template_kwargs={"enable_thinking": False}
            )
        assert seen == [{"reasoning_effort": "low"}, {"enable_thinking": False}]


class TestReplies:
    async def test_token_ids_of_a_chat(self, served: Served) -> None:
        body = {"messages": QUESTION, "n": 2, "return_token_ids": True, **GREEDY}
        prompt = await served.frontend.encode_chat(QUESTION)
        reply = await served.post(CHAT, **body)
        assert reply["prompt_token_ids"] == prompt
        ids = [choice["token_ids"] for choice in reply["choices"]]
        assert [len(one) for one in ids] == [8, 8]
        assert (
            served.frontend.tokenizer.decode(ids[0]) == (reply["choices"][0]["message"]["content"])
        )
        events = await served.stream(CHAT, stream_options={"include_usage": True}, **body)
        assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [prompt] * 2
        assert all(event["usage"] is None for event in events[:-1])
        for index in range(2):
            chunks = [c for e in events for c in e["choices"] if c["index"] == index]
            assert [t for c in chunks for t in c.get("token_ids", ())] == ids[index]
        assert "prompt_token_ids" not in await served.post(CHAT, messages=QUESTION, **GREEDY)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_usage_in_every_event(self, served: Served, path: str) -> None:
        prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": QUESTION}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = await served.stream(path, **prompt, n=2, stream_options=options, **GREEDY)
        for index in range(2):
            counts = [
                event["usage"]["completion_tokens"]
                for event in events
                if event["choices"][0]["index"] == index
            ]
            assert counts == sorted(counts)
            assert counts[-1] == 8
            assert len(set(counts)) > 2  # drafts that are kept come together
        assert {event["usage"]["prompt_tokens"] for event in events} == {
            last["usage"]["prompt_tokens"]
        }
        assert last["usage"]["completion_tokens"] == 16
        events = await served.stream(
            path, **prompt, stream_options={"continuous_usage_stats": True}, **GREEDY
        )
        assert all("usage" not in event for event in events)

    async def test_a_prediction_changes_the_usage_alone(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As text and as parts; in a stream, too. Drafts are tried wherever they may be right."""
        monkeypatch.setattr(RowTimes, "seconds", lambda self, rows: 0.001)
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
        plain = await served.post(CHAT, **body)
        assert "completion_tokens_details" not in plain["usage"]
        text = plain["choices"][0]["message"]["content"]
        half = len(text) // 2
        parts = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
        for content in (text, parts):
            prediction = {"type": "content", "content": content}
            reply = await served.post(CHAT, **body, prediction=prediction)
            assert reply["choices"] == plain["choices"]
            details = reply["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 3
            assert details["rejected_prediction_tokens"] >= 0
        options = {"include_usage": True}
        events = await served.stream(CHAT, **body, prediction=prediction, stream_options=options)
        assert events[-1]["usage"]["completion_tokens_details"].keys() == details.keys()
        await served.post(CHAT, 400, **body, prediction={"type": "content"})
        await served.post(CHAT, 400, **body, prediction={"type": "other", "content": text})

    async def test_logprobs_that_name_ids(self, served: Served) -> None:
        body = {"return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
        choice = await served.complete(prompt=PROMPT, logprobs=20, **body)
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {20}
        reply = await served.post(CHAT, messages=QUESTION, logprobs=True, top_logprobs=20, **body)
        (choice,) = reply["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert {len(entry["top_logprobs"]) for entry in content} == {20}


POSTS = {route.path: route for route in ROUTES if route.method == "POST"}
#: Bodies by path, one of each kind that is answered without an admin key or a folder.
BODIES = {
    path: route.body
    for path, route in POSTS.items()
    if route.body not in (None, AbortRequest, CreateBatch)
    and path.startswith(("/v", "/api", "/p", "/t", "/d", "/s", "/completion", "/r"))
    and path not in ("/v1/score", "/v1/rerank", "/responses")
    and route.example is None  # else of a feature, behind an admin key
    and "{" not in path  # of something that is stored
}
WRONG_TYPES = ({"_": 1}, [{"_": 1}], [[0.5]], True, "\0", 0.5, -(2**70))


class TestTable:
    """`api.fields`, and what the bodies declare: each field of each endpoint is supported, refused
    by name, or changes nothing."""

    @pytest.fixture(autouse=True)
    def only_one_is_answered(self, served: Served) -> None:
        assert served.engine.is_idle

    @pytest.mark.parametrize("path", BODIES)
    async def test_what_is_refused(self, served: Served, path: str) -> None:
        example = EXAMPLES[BODIES[path].__name__]
        steps = served.frontend.stats()["steps"]
        declared = {field.encode_name for field in msgspec.structs.fields(BODIES[path])}
        for name in REFUSED.keys() - declared:
            reply = await served.post(path, 400, **example | {name: {"other": [1]}})
            assert f"{name} is not supported here" in str(reply)
        if BODIES[path].ignored is None:
            reply = await served.post(path, 400, **example, sonnets=1)
            assert "Unrecognized request argument supplied: sonnets" in str(reply)
        assert served.frontend.stats()["steps"] == steps

    @pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/classify"}))
    async def test_what_changes_nothing(self, served: Served, path: str) -> None:
        supported = set(supported_fields(BODIES[path]))
        length = "n_predict" if "n_predict" in supported else "max_tokens"
        few: dict[str, Any] = {"temperature": 0, "stream": False, length: 2}
        few |= {"max_output_tokens": 2, "options": {"num_predict": 2, "temperature": 0}}
        body = EXAMPLES[BODIES[path].__name__] | {
            name: few[name] for name in few if name in supported
        }
        ignored = {"sonnets"} if BODIES[path].ignored is not None else set()
        same = {name: {"deep": [1, {"x": None}]} for name in NO_EFFECT.keys() | ignored}
        same |= {name: neutral[0] for name, neutral in REFUSED.items() if neutral}
        same = {name: value for name, value in same.items() if name not in supported}
        assert len(same) > 80
        replies = [await served.post(path, **body | more) for more in ({}, same)]
        reply_type = POSTS[path].reply
        for reply in replies:
            assert reply_type is None or msgspec.convert(reply, reply_type)
        plain, other = [reply if isinstance(reply, list) else [reply] for reply in replies]
        for one, another in zip(plain, other, strict=True):
            assert one.keys() == another.keys()
            for name in ("choices", "content", "message", "response", "tokens", "input_tokens"):
                assert one.get(name) == another.get(name)

    async def test_texts_are_reranked_to_a_list(self, served: Served) -> None:
        body = {"query": "a river", "texts": ["a stream", "a loaf"], "return_text": True}
        reply: Any = await served.post("/rerank", **body)
        assert msgspec.convert(reply, list[RerankedText])[0].text == "a stream"
        body = EXAMPLES[RerankRequest.__name__] | {"return_text": True}
        assert "return_text goes with texts" in str(await served.post("/rerank", 400, **body))

    @pytest.mark.parametrize("path", BODIES)
    async def test_wrong_types_of_what_is_supported(self, served: Served, path: str) -> None:
        kind = BODIES[path]
        for field in msgspec.structs.fields(kind):
            if field.encode_name not in supported_fields(kind):
                continue
            wrong = [value for value in WRONG_TYPES if not _converts(value, field.type)]
            if field.type is msgspec.Raw:  # a JSON schema, which is read where text is generated
                if path == "/v1/responses/input_tokens":
                    continue
                wrong = [0.5]
            if field.name in ("options", "reasoning"):  # objects whose unknown names are ignored
                wrong = [value for value in wrong if not isinstance(value, dict)]
            for value in wrong[:1] or WRONG_TYPES:
                body = EXAMPLES[kind.__name__] | {field.encode_name: value}
                async with served.http.post(path, json=body) as response:
                    text = await response.text()
                    if response.status == 400:
                        assert field.encode_name in text
                        break
            else:
                raise AssertionError(f"{field.encode_name} may be anything")

    @pytest.mark.parametrize(
        ("kind", "published"),
        [
            (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
            (ChatRequest, chat_params.CompletionCreateParamsBase),
            (ResponseRequest, response_create_params.ResponseCreateParamsBase),
            (ResponseRequest, input_token_count_params.InputTokenCountParams),
            (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
            (CreateBatch, batch_create_params.BatchCreateParams),
            (MessagesRequest, message_create_params.MessageCreateParamsBase),
            (MessagesRequest, beta_create_params.ParseMessageCreateParamsBase),
            (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
            (CountTokensRequest, beta_count_params.MessageCountTokensParams),
        ],
    )
    async def test_a_published_field_has_an_entry(self, kind: type[Body], published: Any) -> None:
        """As the clients of OpenAI and Anthropic that the tests install know them."""
        names = get_type_hints(published).keys()
        assert len(names) > 4
        assert names - {*kind.__struct_fields__, *REFUSED, *NO_EFFECT} == set()

    async def test_what_is_supported_reaches_the_sampling_parameters(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submitted: list[str] = []

        async def record(prompt: Any, params: SamplingParams, **options: Any) -> NoReturn:
            shown = [options[name] for name in ("priority", "cache_salt", "retain_s")]
            submitted.append(str((prompt, params, *shown)))
            raise RequestError("it is recorded")

        monkeypatch.setattr(served.frontend, "submit", record)
        for kind, path, more, elsewhere in (
            (CompletionRequest, COMPLETIONS, OF_COMPLETIONS, COMPLETIONS_ELSEWHERE),
            (ChatRequest, CHAT, OF_CHATS, CHATS_ELSEWHERE),
        ):
            values = OF_BOTH | more
            needs = NEEDS | {"logprob_token_ids": {"logprobs": more["logprobs"]}}
            assert {*values, *elsewhere, *ELSEWHERE} == set(supported_fields(kind))
            for name, value in values.items():
                body = EXAMPLES[kind.__name__] | needs.get(name, {})
                for each in (body, body | {name: value}):
                    reply = await served.post(path, 400, **each)
                    assert reply["error"]["message"] == "it is recorded", name
                assert submitted[-2] != submitted[-1], name


#: What sampling fields other than their defaults are.
OF_BOTH: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "logit_bias": {"5": 1}, "max_tokens": 9, "n_predict": 9, "logprob_token_ids": [5],
    "prompt_logprobs": 1, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [5],
    "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "allowed_token_ids": [5, 6], "bad_words": ["x"], "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "x"},
    "grammar": 'root ::= "x"', "json_schema": {"type": "null"}, "use_beam_search": True,
    "length_penalty": 2, "early_stopping": True, "truncate_prompt_tokens": 2,
    "truncation_side": "right", "priority": 1, "cache_salt": "x", "return_progress": True,
    "vllm_xargs": {"x": 1}, "prompt_cache_key": "x", "prompt_cache_retention": "24h",
}  # fmt: skip
OF_COMPLETIONS = {"prompt": "x", "logprobs": 1}
OF_CHATS = {
    "messages": QUESTION, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 9,
    "add_generation_prompt": False, "parse_special": True,
}  # fmt: skip
#: Other fields that a field needs.
NEEDS: dict[str, Any] = {
    "length_penalty": {"use_beam_search": True, "temperature": 0},
    "early_stopping": {"use_beam_search": True, "temperature": 0},
    "use_beam_search": {"temperature": 0},
    "n_predict": {"max_tokens": None},
    "truncation_side": {"truncate_prompt_tokens": 2},
    "return_progress": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "parse_special": {"messages": [{"role": "user", "content": "<|im_start|>"}]},
}
#: Fields whose effect other tests look at: most of them here.
ELSEWHERE = {
    "model", "timeout_s", "return_token_ids", "return_tokens_as_token_ids", "stream",
    "stream_options",
}  # fmt: skip
COMPLETIONS_ELSEWHERE = {"add_special_tokens", "best_of", "echo", "suffix"}
CHATS_ELSEWHERE = {
    "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "thinking_token_budget",
    "chat_template_kwargs", "documents", "reasoning_effort", "continue_final_message", "verbosity",
    "prediction",
}  # fmt: skip


def _converts(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


class TestForms:
    """What bodies may look like."""

    BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()

    async def post(
        self, served: Served, data: bytes, path: str = COMPLETIONS, **headers: str
    ) -> int:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        skipped = () if "Content-Type" in headers else ("Content-Type",)
        async with served.http.post(
            path, data=data, headers=headers, skip_auto_headers=skipped
        ) as response:
            await response.read()
            return response.status

    async def test_a_byte_order_mark(self, served: Served) -> None:
        mark = b"\xef\xbb\xbf"
        assert await self.post(served, mark + self.BODY, Content_Type="application/json") == 200
        padded = mark + self.BODY[:-1] + b" " * 100_000 + b"}"
        assert await self.post(served, padded, Content_Type="application/json") == 200

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense", "", None]
    )
    async def test_any_content_type(self, served: Served, kind: str | None) -> None:
        headers = {} if kind is None else {"Content_Type": kind}
        assert await self.post(served, self.BODY, **headers) == 200
        # no page of another site can post without asking first
        for page in ({"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
            assert await self.post(served, self.BODY, **headers, **page) == 415
        json_type = {"Content_Type": "application/json", "Origin": "https://evil.example"}
        assert await self.post(served, self.BODY, **json_type) == 200


class TestPaths:
    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("/messages", "/v1/messages"), ("/embeddings", "/v1/embeddings"),
            ("/v1/v1/chat/completions", CHAT), ("/v1/completions/", COMPLETIONS),
            ("/v1//completions", COMPLETIONS), ("/V1/Chat/Completions", CHAT),
            ("/v1/tokenize", "/tokenize"),
        ],
    )  # fmt: skip
    async def test_the_right_path_is_named(self, served: Served, path: str, meant: str) -> None:
        async with served.http.post(path, json={}) as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert error["message"].endswith(f"; did you mean {meant}?")
        assert error["code"] == "not_found"

    async def test_a_path_that_is_like_none(self, served: Served) -> None:
        assert "did you mean" not in (await served.get("/v1/sonnets", 404))["error"]["message"]


class TestErrors:
    async def test_a_prompt_that_is_too_long(self, served: Served) -> None:
        start = "This model's maximum context length is 512 tokens. However, "
        bodies = [
            (COMPLETIONS, {"prompt": [5] * 600}),
            (COMPLETIONS, {"prompt": "word " * 50_000}),
            (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}),
            (CHAT, {"messages": QUESTION, "max_completion_tokens": 512}),
        ]
        for path, body in bodies:
            error = (await served.post(path, 400, **body))["error"]
            assert error["message"].startswith(start)
            assert error["code"] == "context_length_exceeded"

    async def test_a_stream_that_fails_ends_as_one_that_does_not(self, served: Served) -> None:
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 400, "ignore_eos": True}
        async with served.http.post(COMPLETIONS, json=body) as response:
            await response.content.readuntil(b"\n\n")
            (sequence,) = served.engine.requests.sequences.values()
            served.engine.requests.fail(
                sequence.output, GenerationError("the model's logits held NaN")
            )
            *_, error, done, rest = (await response.text()).split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert (done, rest) == ("data: [DONE]", "")

    async def test_every_error_has_a_code(self, served: Served) -> None:
        async with served.http.put(COMPLETIONS) as response:
            assert response.headers["Server"] == "aioinfer"
            assert response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["code"] == "method_not_allowed"
        reply = await served.post(COMPLETIONS, 400, prompt="")
        assert reply["error"]["code"] == "invalid_value"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokenizer knows bytes and the tokens of Qwen2.5-Coder."""
    folder = tiny_model("qwen2", tmp_path_factory.mktemp("coder"))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    names += ["<|file_sep|>", "<think>", "</think>"]
    backend.add_special_tokens(names)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elsewhere(coder: Path) -> AsyncIterator[Served]:
    """A server of that model, with keys, below a path, that ignores what it does not know."""
    template = coder / "chat.jinja"
    text = (
        "{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    await asyncio.to_thread(template.write_text, text, encoding="utf-8")
    async with serve(
        model__path=str(coder),
        parallel__executor="inline",
        server__api_keys=["secret"],
        server__root_path="/llm/",
        server__unknown_fields="ignore",
        model__chat_template=str(template),
    ) as served:
        served.http.headers["Authorization"] = "Bearer secret"
        yield served


class TestThoughts:
    @pytest.mark.parametrize("opens", [False, True])
    async def test_a_budget(self, coder: Path, tmp_path: Path, opens: bool) -> None:
        """A model that thinks for ever is cut off, and goes on with its answer."""
        open_id, close_id = 262, 263
        template = tmp_path / "template.jinja"
        text = "{{ messages[0].content }}" + "<think>" * opens
        await asyncio.to_thread(template.write_text, text, encoding="utf-8")
        settings = {"model__chat_template": str(template), "chat__reasoning_format": "think"}
        async with serve(model__path=str(coder), parallel__executor="inline", **settings) as served:
            body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0,
                    "return_token_ids": True, "logit_bias": {str(open_id): 50}}  # fmt: skip
            for budget in (0, 1, 5):
                reply = await served.post(CHAT, **body, thinking_token_budget=budget)
                ids = reply["choices"][0]["token_ids"]
                thought = ids if opens else ids[1:]
                assert opens or ids[0] == open_id
                assert thought.index(close_id) == budget
                assert reply["usage"]["completion_tokens"] == 12
                streamed = await served.stream(CHAT, **body, thinking_token_budget=budget)
                parts = [event["choices"][0].get("token_ids", []) for event in streamed]
                assert [token for part in parts for token in part] == ids
            free = await served.post(CHAT, **body, thinking_token_budget=-1)
            assert close_id not in free["choices"][0]["token_ids"]
            for wrong in (-2, 0.6, "x"):
                reply = await served.post(CHAT, 400, **body, thinking_token_budget=wrong)
                assert reply["error"]["param"] == "thinking_token_budget"
            if opens:
                await self.check_anthropic(served, body)

    async def check_anthropic(self, served: Served, body: dict[str, Any]) -> None:
        """The budget is the same in Anthropic's API, where the thought may be left out."""
        (choice,) = (await served.post(CHAT, **body, thinking_token_budget=5))["choices"]
        same = {name: body[name] for name in ("messages", "max_tokens", "temperature")}
        thinking = {"type": "enabled", "budget_tokens": 5}
        reply = await served.post("/v1/messages", **same, thinking=thinking)
        thought, text = reply["content"]
        assert thought["thinking"] == choice["message"]["reasoning_content"]
        assert text["text"] == choice["message"]["content"]
        reply = await served.post(
            "/v1/messages", **same, thinking=thinking | {"display": "omitted"}
        )
        assert reply["content"] == [text]
        reply = await served.post("/v1/messages", **same)
        assert [block["type"] for block in reply["content"]] == ["thinking"]

    async def test_a_budget_of_a_model_that_does_not_think(self, served: Served) -> None:
        reply = await served.post(CHAT, messages=QUESTION, **GREEDY, thinking_token_budget=1)
        same = await served.post(CHAT, messages=QUESTION, **GREEDY)
        assert reply["choices"] == same["choices"]


class TestElsewhere:
    async def test_a_suffix(self, elsewhere: Served) -> None:
        tokenizer = elsewhere.frontend.tokenizer
        end, prefix, suffix, middle, pad = range(256, 261)
        before, after = (tokenizer.encode(text) for text in ("def f(", "): pass"))
        body = {"suffix": "): pass", "max_tokens": 4, "return_token_ids": True}
        for prompt in ("def f(", before):
            (choice,) = (await elsewhere.post(COMPLETIONS, prompt=prompt, **body))["choices"]
            assert choice["prompt_token_ids"] == [
                prefix, *before, suffix, *after, middle,
            ]  # fmt: skip
        for token in (end, pad):
            bias = {"logit_bias": {str(token): 100}, "temperature": 0}
            (choice,) = (await elsewhere.post(COMPLETIONS, prompt="x", **body, **bias))["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")

    async def test_an_answer_that_has_begun(self, elsewhere: Served) -> None:
        tokenizer = elsewhere.frontend.tokenizer
        begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Wh"}]
        ends = {"add_generation_prompt": False, "continue_final_message": True}
        for fields, prompt in ((ends, "ux.aWh"), ({}, "ux.aWh.a")):
            body = {"messages": begun, "max_tokens": 1, "return_token_ids": True, **fields}
            reply = await elsewhere.post(CHAT, **body)
            assert tokenizer.decode(reply["prompt_token_ids"]) == prompt

    async def test_keys_in_other_headers(self, elsewhere: Served) -> None:
        wrong, right = "guess", "secret"
        cases = [
            ({"X-Api-Key": right}, 200), ({"api-key": right}, 200),
            ({"Authorization": "Basic abc", "x-api-key": right}, 200),
            ({"X-Api-Key": wrong}, 401), ({"api-key": f"Bearer {right}"}, 401), ({}, 401),
        ]  # fmt: skip
        async with aiohttp.ClientSession(elsewhere.url) as http:
            for headers, status in cases:
                async with http.get("/v1/models", headers=headers) as response:
                    assert response.status == status

    @pytest.mark.parametrize("prefix", ["", "/llm"])
    async def test_a_path_of_a_proxy(self, elsewhere: Served, prefix: str) -> None:
        reply = await elsewhere.post(f"{prefix}/v1/completions", prompt="x", max_tokens=1)
        assert reply["usage"]["completion_tokens"] == 1
        for path, status in (("/health?x=1", 200), ("", 200), ("/nothing", 404)):
            async with elsewhere.http.get(f"{prefix}{path}" or "/") as response:
                assert response.status == status
        async with elsewhere.http.get("/llmv1/models") as response:
            assert response.status == 404

    async def test_unknown_names_may_be_ignored(self, elsewhere: Served) -> None:
        await elsewhere.post(COMPLETIONS, prompt="x", max_tokens=1, temprature=1)
        reply = await elsewhere.post(COMPLETIONS, 400, prompt="x", prompt_embeds="x")
        assert reply["error"]["param"] == "prompt_embeds"
