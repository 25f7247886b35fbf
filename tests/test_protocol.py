from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.api.anthropic import MessagesRequest
from aioinfer.api.decoding import MAX_PROMPTS, Body, decode
from aioinfer.api.fields import NO_EFFECT, REFUSED
from aioinfer.api.llama_cpp import LlamaCompletion, LlamaEmbedding
from aioinfer.api.ollama import OllamaChat, OllamaEmbedRequest, OllamaGenerate, ShowRequest
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.completions import CompletionRequest
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.api.openai.tokenization import DetokenizeRequest, TokenizeRequest
from aioinfer.api.protocol import template_options
from aioinfer.errors import RequestError
from aioinfer.sampling_params import SamplingParams

#: Fields without an effect elsewhere.
DONE_HERE = {"return_progress", "stream_options"}
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "hello"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps({"messages": HELLO} | fields).encode(), ChatRequest)


def refused(raw: bytes, kind: type[Body] = CompletionRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(raw, kind)
    assert caught.value.status == 400
    return caught.value


class TestSampling:
    def test_every_field_reaches_the_sampling_parameters(self) -> None:
        given = {
            "n": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": -3,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "max_tokens": 9, "min_tokens": 2,
            "ignore_eos": True,
            "skip_special_tokens": False, "logprobs": 4,
        }  # fmt: skip
        params = SamplingParams(
            **completion(
                **given, logit_bias={"5": 1, "6": -2.5}, stop=["a", "b"], stop_token_ids=[1, 2],
                include_stop_str_in_output=True,
            ).sampling_fields()
        )  # fmt: skip
        for name, value in given.items():
            assert getattr(params, name) == pytest.approx(value, rel=1e-7), name
        assert params.logit_bias == {5: 1.0, 6: -2.5}
        assert params.stop == ("a", "b")
        assert params.stop_token_ids == (1, 2)
        assert params.include_stop is True

    def test_what_is_missing_or_null_is_left_to_the_defaults(self) -> None:
        assert completion().sampling_fields() == {}
        assert (
            completion(
                temperature=None, stop=None, n=None, stream=None, logit_bias=None
            ).sampling_fields()
            == {}
        )

    def test_zero_and_false_are_not_missing(self) -> None:
        given = {"temperature": 0, "top_k": 0, "min_tokens": 0, "ignore_eos": False, "logprobs": 0}
        assert completion(**given).sampling_fields() == given

    def test_a_single_stop_string(self) -> None:
        assert completion(stop="END").sampling_fields() == {"stop": "END"}

    def test_the_names_of_biases_are_ids(self) -> None:
        given = {"5": 1, "-1": 3}
        assert completion(logit_bias=given).sampling_fields() == {"logit_bias": {5: 1, -1: 3}}
        for name in (" cheese", "5.0", ""):
            with pytest.raises(RequestError, match="each name in logit_bias must be an integer"):
                completion(logit_bias={name: 1})

    def test_of_two_fields_for_one_parameter_the_last_counts(self) -> None:
        assert chat(max_completion_tokens=3, max_tokens=5).sampling_fields() == {"max_tokens": 3}
        assert chat(max_completion_tokens=None, max_tokens=5).sampling_fields() == {"max_tokens": 5}

    @pytest.mark.parametrize("text", ["3.0", "3.000", "0.3e1", "30E-1", " 3.0 "])
    def test_an_integral_number_is_an_integer(self, text: str) -> None:
        raw = f'{{"prompt": "x", "max_tokens": {text}, "temperature": 1.0, "n": 2}}'.encode()
        fields = decode(raw, CompletionRequest).sampling_fields()
        assert fields == {"max_tokens": 3, "temperature": 1.0, "n": 2}

    @pytest.mark.parametrize("name", ["n", "best_of"])
    def test_too_wide_a_search_names_the_field_of_its_width(self, name: str) -> None:
        body = completion(use_beam_search=True, **{name: 65})
        with pytest.raises(RequestError) as caught:
            body.sampling_fields()
        assert caught.value.param == name

    def test_best_of(self) -> None:
        assert completion(n=2, best_of=2, stream=True).best_of == 2
        assert completion(n=2, best_of=4).sampling_fields() == {"n": 2}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": "hot"}, "temperature"),
            ({"temperature": True}, "temperature"),
            ({"n": 1.5}, "n"), ({"n": True}, "n"), ({"n": 10**30}, "n"),
            ({"top_k": 2**31}, "top_k"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 2**40}, "max_tokens"),
            ({"min_tokens": 2**31}, "min_tokens"),
            ({"seed": 2**64}, "seed"), ({"seed": "x"}, "seed"), ({"stop": 3}, "stop"),
            ({"stop": ["a", 3]}, "stop[1]"),
            ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
            ({"stop_token_ids": 5}, "stop_token_ids"),
            ({"logit_bias": {"5": "much"}}, "logit_bias"),
            ({"logit_bias": [1]}, "logit_bias"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            (
                {"stream": True, "stream_options": {"include_usage": 1}},
                "stream_options.include_usage",
            ),
            ({"model": 5}, "model"), ({"echo": 1}, "echo"),
            ({"logprobs": True}, "logprobs"),
            ({"suffix": "x", "echo": True}, "echo"),
            ({"suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"best_of": 0}, "best_of"),
            ({"n": 2, "best_of": 1}, "best_of"),
            ({"best_of": 129}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"cache_salt": ""}, "cache_salt"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"timeout_s": "1"}, "timeout_s"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ({"priority": 2**63}, "priority"),
        ],
    )  # fmt: skip
    def test_a_wrong_field_is_named(self, fields: dict[str, Any], param: str) -> None:
        error = refused(json.dumps({"prompt": "x"} | fields).encode())
        assert error.param == param
        assert param.split("[")[0] in error.message

    @pytest.mark.parametrize(
        "number",
        ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 5000, "0x10", "01", "+1"],
    )
    def test_numbers_that_are_none(self, number: str) -> None:
        refused(f'{{"prompt": "x", "temperature": {number}}}'.encode())


class TestMessages:
    """Errors speak of JSON and quote what is wrong."""

    @pytest.mark.parametrize(
        ("fields", "message", "code"),
        [
            ({"n": "two"}, 'n must be an integer, not a string: "two"', "invalid_type"),
            ({"n": 1.5}, "n must be an integer, not a number: 1.5", "invalid_type"),
            ({"max_tokens": -3}, "max_tokens must be an integer >= 0, not -3", "invalid_value"),
            ({"stop": ["a", None]}, "stop[1] must be a string, not null: null", "invalid_type"),
            ({"stream": "yes"}, 'stream must be a boolean, not a string: "yes"', "invalid_type"),
            (
                {"stop": {"a": "b" * 1000}},
                "stop must be a string or an array, not an object: "
                f'{{"a":"{"b" * 34} … {"b" * 38}"}}',
                "invalid_type",
            ),
            (
                {"logit_bias": {"5": "much"}},
                "each value in logit_bias must be a number, not a string",
                "invalid_type",
            ),
            ({"prompt": [1, -2]}, "prompt[1] must be an integer >= 0, not -2", "invalid_value"),
        ],
    )  # fmt: skip
    def test_wrong_values(self, fields: dict[str, Any], message: str, code: str) -> None:
        error = refused(json.dumps({"prompt": "x"} | fields).encode())
        assert (error.message, error.code) == (message, code)

    @pytest.mark.parametrize(
        ("raw", "message", "code"),
        [
            (b"{}", "prompt is missing", "missing_required_parameter"),
            (b"[]", "the body must be an object, not an array", "invalid_type"),
            (b"{", "the body is not valid JSON: ", "invalid_json"),
            (b'{"prompt": "\\ud800"}', "a text holds half of a surrogate pair", "invalid_json"),
        ],
    )
    def test_wrong_bodies(self, raw: bytes, message: str, code: str) -> None:
        error = refused(raw)
        assert error.message.startswith(message)
        assert error.code == code


class TestUndeclaredFields:
    @pytest.mark.parametrize(
        "name", sorted(NO_EFFECT.keys() - {"options", "return_progress", "stream_options"})
    )
    def test_what_changes_nothing_is_ignored(self, name: str) -> None:
        # as it stands, at the end, and with a number that has to be repaired beside it
        body = completion(**{name: {"deep": [1, {"x": None}]}, "max_tokens": 3.0} | {"user": "me"})
        assert body.sampling_fields() == {"max_tokens": 3}
        for value in ("text", [1, {"x": [None]}], 1, 0.5, True, None, {}):
            if name not in ("metadata", "store"):  # which have a meaning in a chat
                assert chat(**{name: value}).sampling_fields() == {}

    def test_what_is_ignored_does_not_have_a_body_decoded_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("aioinfer.api.decoding._decode_again", None)
        chat(store=False, metadata={"a": "b"}, service_tier="auto", cache_prompt=True)

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_what_would_change_the_answer_is_refused(self, name: str) -> None:
        neutral = REFUSED[name]
        for kind, make in ((CompletionRequest, completion), (ChatRequest, chat)):
            if name in kind.__struct_fields__:
                continue
            for value in (None, *neutral):
                assert make(**{name: value}).sampling_fields() == {}
            for ignores in (False, True):
                raw = {"prompt": "x"} if kind is CompletionRequest else {"messages": HELLO}
                with pytest.raises(RequestError) as caught:
                    decode(
                        json.dumps(raw | {name: ["else"]}).encode(), kind, ignores_unknown=ignores
                    )
                assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
                assert name in caught.value.message

    def test_zero_is_not_false(self) -> None:
        for name, value in (("detokenize", 1), ("n_probs", False)):
            with pytest.raises(RequestError):
                completion(**{name: value})
        assert completion(typical_p=1.0, mirostat=0.0).sampling_fields() == {}

    def test_a_name_that_nobody_knows(self) -> None:
        with pytest.raises(RequestError) as caught:
            completion(temprature=0.5)
        assert caught.value.message == (
            "Unrecognized request argument supplied: temprature (did you mean temperature?)"
        )
        assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")
        assert completion(temprature=None).sampling_fields() == {}
        raw = b'{"prompt": "x", "temprature": 1, "top_k": 3}'
        ignored = decode(raw, CompletionRequest, ignores_unknown=True)
        assert ignored.sampling_fields() == {"top_k": 3}

    @pytest.mark.parametrize(
        ("kind", "raw", "near"),
        [
            (OllamaChat, {"messages": HELLO}, "mesages"),
            (OllamaGenerate, {"prompt": "x"}, "promt"),
            (OllamaEmbedRequest, {"input": "x"}, "inputs"),
            (ShowRequest, {"name": "x"}, "modell"),
            (LlamaCompletion, {"prompt": "x"}, "temprature"),
            (LlamaEmbedding, {"content": "x"}, "contents"),
        ],
    )
    def test_ollama_and_llama_cpp_ignore_unknown_names(
        self, kind: type[Body], raw: dict[str, Any], near: str
    ) -> None:
        """But not one that nearly is a field's, or that would change the answer."""
        plain = decode(json.dumps(raw).encode(), kind)
        more = raw | {"frobnicate": [1], "_debug_render_only": True}
        assert decode(json.dumps(more).encode(), kind) == plain
        for name, code in ((near, "unknown_parameter"), ("regex", "unsupported_parameter")):
            error = refused(json.dumps(raw | {name: "x"}).encode(), kind)
            assert (error.param, error.code) == (name, code)

    @pytest.mark.parametrize(
        ("kind", "raw"),
        [
            (CompletionRequest, {"prompt": "x"}),
            (ChatRequest, {"messages": HELLO}),
            (ResponseRequest, {"input": "x"}),
            (MessagesRequest, {"messages": HELLO, "max_tokens": 1}),
        ],
    )
    def test_openai_and_anthropic_refuse_them(self, kind: type[Body], raw: dict[str, Any]) -> None:
        decode(json.dumps(raw).encode(), kind)
        error = refused(json.dumps(raw | {"frobnicate": 1}).encode(), kind)
        assert (error.param, error.code) == ("frobnicate", "unknown_parameter")

    def test_messages_may_hold_more_than_is_read(self) -> None:
        assert chat(messages=[HELLO[0] | {"annotations": []}]).messages[0].content == "hello"


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("text", ["text"]), ("", [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]),
            ([[1], [2, 3]], [[1], [2, 3]]),
            ([[]], [[]]), (["a", 1], [["a", 1]]),
            ([[1, "a"], "b"], [[1, "a"], "b"]),
        ],
    )  # fmt: skip
    def test_shapes(self, prompt: Any, prompts: list[Any]) -> None:
        assert completion(prompt=prompt).prompts() == prompts

    @pytest.mark.parametrize("prompt", [[], [1, [2]], ["a", [1], 1]])
    def test_empty_and_mixed_lists(self, prompt: Any) -> None:
        assert refused(json.dumps({"prompt": prompt}).encode()).param == "prompt"

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [
            (5, "prompt"), (None, "prompt"), ({"text": "x"}, "prompt"), ([1, -2], "prompt[1]"),
            ([1, 2**31], "prompt[1]"), ([1, 2**70], "prompt[1]"), ([1, 1.0], "prompt[1]"),
            ([1, True], "prompt[1]"), ([1, None], "prompt[1]"),
            ([[1], [2, {}]], "prompt[1][1]"),
            ([[[1]]], "prompt[0][0]"),
        ],
    )  # fmt: skip
    def test_wrong_types(self, prompt: Any, param: str) -> None:
        assert refused(json.dumps({"prompt": prompt}).encode()).param == param

    def test_as_many_prompts_as_allowed(self) -> None:
        assert len(completion(prompt=["x"] * MAX_PROMPTS).prompts()) == MAX_PROMPTS
        assert refused(json.dumps({"prompt": ["x"] * (MAX_PROMPTS + 1)}).encode()).param == "prompt"
        assert len(completion(prompt=[1] * (MAX_PROMPTS + 1)).prompts()) == 1


class TestMalformed:
    @pytest.mark.parametrize(
        "raw",
        [
            b"", b"{", b"nonsense", b'{"prompt": "x"} trailing', b'{"prompt": "x",}',
            b"{'prompt': 'x'}", b'{"prompt": "x\x00y"}', b'{"prompt": "\\ud800"}',
            b'{"prompt": "\\udc00 x"}', b'{"prompt": "\\ud83d\\ud83d"}',
            b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xff"}', b"\xef\xbb\xbf{}",
            '{"prompt": "x"}'.encode("utf-16"),
            b'{"prompt": "x", "unknown": ' + b"[" * 100_000,
            b'{"prompt": "x", "unknown": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
            b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ],
    )  # fmt: skip
    def test_refused(self, raw: bytes) -> None:
        error = refused(raw)
        assert (error.param or "prompt").startswith("prompt")
        assert error.message

    @pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"text"'])
    def test_not_an_object(self, raw: bytes) -> None:
        error = refused(raw)
        assert error.param is None
        assert "object" in error.message

    def test_an_escaped_nul_is_a_character(self) -> None:
        assert decode(b'{"prompt": "a\\u0000b"}', CompletionRequest).prompts() == ["a\0b"]


class TestChat:
    def test_limit_and_logprobs(self) -> None:
        assert chat(max_tokens=5, max_completion_tokens=7).sampling_fields() == {"max_tokens": 7}
        assert chat(logprobs=True).sampling_fields() == {"logprobs": 0}
        assert chat(logprobs=True, top_logprobs=3).sampling_fields() == {"logprobs": 3}
        assert chat(logprobs=False).sampling_fields() == {}

    def test_plain_text_may_be_requested(self) -> None:
        body = chat(response_format={"type": "text"}, tool_choice="auto")
        assert body.sampling_fields() == {}
        assert body.tool_use().tools == ()

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"), ({"messages": None}, "messages"),
            ({"messages": "hello"}, "messages"), ({"messages": ["hello"]}, "messages[0]"),
            ({"messages": [*HELLO, {"role": "", "content": "x"}]}, "messages[1].role"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
             "messages[0].content[0].image_url.url"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
             "messages[0].content[0].text"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprob_token_ids": [5]}, "logprob_token_ids"),
            ({"logprobs": True, "logprob_token_ids": [-5]}, "logprob_token_ids[0]"),
            ({"response_format": "json"}, "response_format"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
            ({"tools": "hammer"}, "tools"), ({"tools": [3]}, "tools[0]"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ],
    )  # fmt: skip
    def test_a_wrong_field_is_named(self, fields: dict[str, Any], param: str) -> None:
        assert (
            refused(json.dumps({"messages": HELLO} | fields).encode(), ChatRequest).param == param
        )

    def test_template_options(self) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        plain = {
            "tools": None, "add_generation_prompt": True, "continue_final_message": False,
            "parse_special": False, "template_kwargs": None,
        }  # fmt: skip
        assert template_options(chat()) == plain
        assert template_options(chat(parse_special=True)) == plain | {"parse_special": True}
        assert template_options(chat(tools=tools)) == plain | {"tools": tools}
        assert template_options(chat(tools=tools, tool_choice="none")) == plain
        assert template_options(chat(chat_template_kwargs={"enable_thinking": False})) == plain | {
            "template_kwargs": {"enable_thinking": False}
        }
        given = chat(
            reasoning_effort="low", documents=[{"text": "x"}], chat_template_kwargs={"a": 1}
        )
        assert template_options(given) == plain | {
            "template_kwargs": {"reasoning_effort": "low", "documents": [{"text": "x"}], "a": 1}
        }
        assert template_options(chat(continue_final_message=True)) == plain | {
            "add_generation_prompt": False,
            "continue_final_message": True,
        }


class TestTokenize:
    def test_prompt_or_messages(self) -> None:
        assert decode(b'{"prompt": ""}', TokenizeRequest).prompt == ""
        assert (
            decode(json.dumps({"messages": HELLO}).encode(), TokenizeRequest).messages is not None
        )
        assert refused(b"{}", TokenizeRequest).param == "prompt"
        assert (
            refused(json.dumps({"prompt": "x", "messages": HELLO}).encode(), TokenizeRequest).param
            == "messages"
        )

    def test_tokens_are_ids(self) -> None:
        assert decode(b'{"tokens": [1, 2]}', DetokenizeRequest).tokens == [1, 2]
        assert refused(b'{"tokens": [1, -2]}', DetokenizeRequest).param == "tokens[1]"
        assert refused(b'{"tokens": "x"}', DetokenizeRequest).param == "tokens"
