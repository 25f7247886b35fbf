"""The HTTP API over a socket: shapes of replies and streams, and that each field does what it
says."""

from __future__ import annotations

import time
from typing import Any

import pytest

from aioinfer import __version__
from tests.functional.conftest import Served

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """Joins the text of a choice's chunks."""
    choices = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(
        each["text"] if "text" in each else each["delta"].get("content", "") for each in choices
    )


class TestCompletions:
    async def test_a_reply(self, speaking: Served) -> None:
        before = int(time.time())
        reply = await speaking.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert reply["id"].startswith("cmpl-")
        assert reply["object"] == "text_completion"
        assert before <= reply["created"] <= time.time()
        assert reply["model"] == "smollm2"
        (choice,) = reply["choices"]
        assert choice["index"] == 0
        assert "Paris" in choice["text"]
        assert choice["finish_reason"] == "length"
        assert (choice["stop_reason"], choice["logprobs"]) == (None, None)
        count = len(await speaking.frontend.encode(PROMPT))
        counts = {"prompt_tokens": count, "completion_tokens": 8, "total_tokens": count + 8}
        assert reply["usage"].items() >= counts.items()

    async def test_a_stream_gives_the_same_text_in_pieces(self, served: Served) -> None:
        reply = await served.complete(prompt=PROMPT, **GREEDY)
        events = await served.stream("/v1/completions", prompt=PROMPT, **GREEDY)
        assert text_of(events) == reply["text"]
        assert len(events) > 5
        assert len({(event["id"], event["created"]) for event in events}) == 1
        assert {event["object"] for event in events} == {"text_completion"}
        assert {event["model"] for event in events} == {"smollm2"}
        assert all("usage" not in event for event in events)
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + ["length"]
        *events, last = await served.stream(
            "/v1/completions", prompt=PROMPT, stream_options={"include_usage": True}, **GREEDY
        )
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        whole = await served.post("/v1/completions", prompt=PROMPT, **GREEDY)
        assert last["usage"] == whole["usage"]

    @pytest.mark.parametrize("as_ids", [False, True])
    async def test_several_prompts_with_several_choices(self, served: Served, as_ids: bool) -> None:
        texts = [PROMPT, "Water boils at"]
        prompts = [await served.frontend.encode(text) for text in texts] if as_ids else texts
        alone = [(await served.complete(prompt=text, **GREEDY))["text"] for text in texts]
        reply = await served.post("/v1/completions", prompt=prompts, n=2, **GREEDY)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        both = [text for text in alone for _ in range(2)]
        assert [choice["text"] for choice in reply["choices"]] == both
        counts = [len(await served.frontend.encode(text)) for text in texts]
        assert reply["usage"]["prompt_tokens"] == sum(counts)
        assert reply["usage"]["completion_tokens"] == 4 * 8
        events = await served.stream("/v1/completions", prompt=prompts, n=2, **GREEDY)
        assert [text_of(events, index) for index in range(4)] == both
        choices = [choice for event in events for choice in event["choices"]]
        ended = sorted(choice["index"] for choice in choices if choice["finish_reason"])
        assert ended == [0, 1, 2, 3]

    async def test_max_tokens_is_sixteen_by_default(self, served: Served) -> None:
        reply = await served.post("/v1/completions", prompt=PROMPT, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 16

    async def test_the_default_length_shrinks_to_what_fits(self, served: Served) -> None:
        reply = await served.post(
            "/v1/completions", prompt=[5] * (served.frontend.max_model_len - 3), ignore_eos=True
        )
        assert reply["usage"]["completion_tokens"] == 3

    async def test_echo(self, served: Served) -> None:
        ids = await served.frontend.encode(PROMPT)
        text = (await served.complete(prompt=PROMPT, **GREEDY))["text"]
        assert (await served.complete(prompt=PROMPT, echo=True, **GREEDY))["text"] == PROMPT + text
        assert (await served.complete(prompt=ids, echo=True, **GREEDY))["text"] == PROMPT + text
        events = await served.stream("/v1/completions", prompt=PROMPT, echo=True, **GREEDY)
        assert text_of(events) == PROMPT + text

    async def test_stop_strings(self, served: Served) -> None:
        text = (await served.complete(prompt=PROMPT, **GREEDY))["text"]
        stop = text[5:8]  # begins and ends within tokens
        expected = text[: text.index(stop)]
        choice = await served.complete(prompt=PROMPT, stop=stop, **GREEDY)
        assert choice["text"] == expected
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        events = await served.stream("/v1/completions", prompt=PROMPT, stop=[stop], **GREEDY)
        assert text_of(events) == expected
        choice = await served.complete(
            prompt=PROMPT, stop=stop, include_stop_str_in_output=True, **GREEDY
        )
        assert choice["text"] == expected + stop

    async def test_stop_tokens(self, served: Served) -> None:
        text = (await served.complete(prompt=PROMPT, **GREEDY))["text"]
        token = (await served.frontend.encode(text))[3]
        choice = await served.complete(prompt=PROMPT, stop_token_ids=[token], **GREEDY)
        assert text.startswith(choice["text"])
        assert len(choice["text"]) < len(text)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)

    async def test_a_seed_repeats(self, served: Served) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.5, "max_tokens": 8}
        body |= {"top_p": 0.99, "top_k": 1000, "min_p": 0.0001}
        texts = [(await served.complete(seed=seed, **body))["text"] for seed in (7, 7, 8)]
        assert texts[0] == texts[1] != texts[2]

    async def test_logprobs(self, served: Served) -> None:
        choice = await served.complete(prompt=PROMPT, logprobs=3, **GREEDY)
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset, logprob, top in zip(
            *(logprobs[k] for k in ("tokens", "text_offset", "token_logprobs", "top_logprobs")),
            strict=True,
        ):
            assert choice["text"][offset : offset + len(token)] == token
            assert len(top) == 3
            assert top[token] == logprob == max(top.values()) < 0
        events = await served.stream("/v1/completions", prompt=PROMPT, logprobs=3, **GREEDY)
        parts = [part for event in events if (part := event["choices"][0]["logprobs"])]
        assert {key: [e for part in parts for e in part[key]] for key in logprobs} == logprobs

    @pytest.mark.parametrize("model", ["smollm2", "org/alias", None])
    async def test_names_of_the_model(self, served: Served, model: str | None) -> None:
        reply = await served.post("/v1/completions", prompt=PROMPT, max_tokens=1, model=model)
        assert reply["model"] == "smollm2"

    async def test_nul_bytes_are_text(self, served: Served) -> None:
        counts = {}
        for text in ("a\0b", "ab"):
            reply = await served.post("/v1/completions", prompt=text, max_tokens=1)
            counts[text] = reply["usage"]["prompt_tokens"]
            assert counts[text] == len(await served.frontend.encode(text))
        assert counts["a\0b"] > counts["ab"]


class TestChat:
    async def test_a_reply(self, speaking: Served) -> None:
        reply = await speaking.post("/v1/chat/completions", messages=QUESTION, temperature=0)
        assert reply["id"].startswith("chatcmpl-")
        assert reply["object"] == "chat.completion"
        (choice,) = reply["choices"]
        assert choice["message"]["role"] == "assistant"
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert reply["usage"]["prompt_tokens"] == len(await speaking.frontend.encode_chat(QUESTION))

    async def test_special_tokens_in_messages_are_text_unless_asked_for(
        self, served: Served
    ) -> None:
        chat = {"messages": [{"role": "user", "content": "hi<|im_end|>\n<|im_start|>system\nx"}]}
        plain = await served.post("/tokenize", **chat)
        parsed = await served.post("/tokenize", **chat, parse_special=True)
        start, end = served.frontend.tokenizer.encode("<|im_start|><|im_end|>")
        assert parsed["tokens"].count(start) == plain["tokens"].count(start) + 1
        assert parsed["tokens"].count(end) == plain["tokens"].count(end) + 1
        for options, tokenized in (({}, plain), ({"parse_special": True}, parsed)):
            reply = await served.post("/v1/chat/completions", **chat, **options, max_tokens=1)
            assert reply["usage"]["prompt_tokens"] == tokenized["count"]
        (start_of_text,) = (await served.post("/tokenize", prompt="<|im_start|>"))["tokens"]
        assert start_of_text == start

    async def test_a_stream_opens_with_the_role(self, served: Served) -> None:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 6}
        reply = await served.post("/v1/chat/completions", **body)
        events = await served.stream(
            "/v1/chat/completions", stream_options={"include_usage": True}, **body
        )
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        first, *chunks, finish, usage = events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks)
        (choice,) = finish["choices"]
        assert (choice["delta"], choice["finish_reason"]) == ({}, "length")
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)
        assert text_of(events) == reply["choices"][0]["message"]["content"]

    async def test_every_choice_has_its_own_opening(self, served: Served) -> None:
        events = await served.stream(
            "/v1/chat/completions", messages=QUESTION, n=3, temperature=0, max_tokens=3
        )
        choices = [event["choices"][0] for event in events]
        assert sorted(each["index"] for each in choices if "role" in each["delta"]) == [0, 1, 2]
        assert text_of(events, 0) == text_of(events, 1) == text_of(events, 2) != ""

    async def test_logprobs(self, served: Served) -> None:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 6}
        reply = await served.post("/v1/chat/completions", logprobs=True, top_logprobs=2, **body)
        choice = reply["choices"][0]
        content = choice["logprobs"]["content"]
        data = b"".join(bytes(entry["bytes"]) for entry in content)
        assert data.decode() == choice["message"]["content"]
        for entry in content:
            first, _ = entry["top_logprobs"]
            assert first == {key: entry[key] for key in ("token", "logprob", "bytes")}

    async def test_what_makes_up_the_prompt(self, served: Served) -> None:
        async def prompt(**body: Any) -> str:
            tokens = (await served.post("/tokenize", **body))["tokens"]
            return (await served.post("/detokenize", tokens=tokens))["prompt"]

        parts = [{"type": "text", "text": text} for text in ("Hi", "there")]
        whole = await prompt(messages=[{"role": "user", "content": "Hi\nthere"}])
        assert await prompt(messages=[{"role": "user", "content": parts}]) == whole
        developer, system = (
            [{"role": role, "content": "Be brief."}, *QUESTION] for role in ("developer", "system")
        )
        plain = await prompt(messages=QUESTION)
        assert await prompt(messages=developer) == await prompt(messages=system) != plain
        assert plain.startswith(await prompt(messages=QUESTION, add_generation_prompt=False))
        unfinished = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
        continued = await prompt(messages=unfinished, continue_final_message=True)
        assert continued.endswith("The capital is")

    async def test_going_on_with_the_last_message(self, speaking: Served) -> None:
        unfinished = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
        reply = await speaking.post(
            "/v1/chat/completions", messages=unfinished, continue_final_message=True, **GREEDY
        )
        assert reply["choices"][0]["message"]["content"].startswith(" Paris")


class TestTokens:
    async def test_there_and_back(self, served: Served) -> None:
        text = "Größe 🎉 <|im_start|>"
        reply = await served.post("/tokenize", prompt=text, return_token_strs=True)
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert reply["tokens"] == await served.frontend.encode(text)
        assert reply["token_strs"][-1] == "<|im_start|>"
        assert reply["max_model_len"] == served.frontend.max_model_len
        # by vLLM's name and by llama.cpp's
        both = {"prompt": text, "content": text}
        assert await served.post("/detokenize", tokens=reply["tokens"]) == both

    async def test_nothing(self, served: Served) -> None:
        assert (await served.post("/tokenize", prompt=""))["tokens"] == []
        assert await served.post("/detokenize", tokens=[]) == {"prompt": "", "content": ""}

    async def test_a_long_text(self, served: Served) -> None:
        text = "Lorem ipsum dolor sit amet. " * 10_000
        reply = await served.post("/tokenize", prompt=text, return_token_strs=True)
        assert len(reply["tokens"]) == reply["count"] > 50_000, "it is written in pieces"
        assert "".join(reply["token_strs"]) == text
        assert (await served.post("/detokenize", tokens=reply["tokens"]))["prompt"] == text


class TestInfo:
    async def test_models(self, served: Served) -> None:
        models = await served.get("/v1/models")
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["smollm2", "org/alias"]
        for model in models["data"]:
            assert (model["object"], model["max_model_len"]) == ("model", 512)
            assert await served.get(f"/v1/models/{model['id']}") == model

    async def test_health_and_version(self, served: Served) -> None:
        async with served.http.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        async with served.http.get("/version") as response:
            assert await response.json() == {"version": __version__}
