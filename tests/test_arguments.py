"""What programs may write: engine arguments, prompts, conversations and sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioinfer.arguments import (
    as_chat_options,
    as_conversations,
    as_params,
    as_prompts,
    make_config,
    params_of_each,
)
from aioinfer.config import Config
from aioinfer.errors import ConfigError, RequestError
from aioinfer.sampling_params import BeamSearch, BeamSearchParams, SamplingParams


def config(**arguments: Any) -> Config:
    return make_config("model", None, None, arguments)


def test_arguments_are_keys_by_their_own_names_and_by_vllms() -> None:
    made = config(
        tensor_parallel_size=2, pipeline_parallel_size=3, dtype=torch.float16, max_model_len=99,
        gpu_memory_utilization=0.5, max_num_seqs=7, enable_prefix_caching=False, quantization="awq",
        seed=5, trust_remote_code=True, block_size=64, kv_cache_dtype="fp8_e4m3",
        enforce_eager=True, served_model_name="short", distributed_executor_backend="mp",
        tokenizer=None, enable_chunked_prefill=True, disable_log_stats=False, revision="v2",
        skip_tokenizer_init=False, async_scheduling=True,
    )  # fmt: skip
    model, cache, parallel = made.model, made.cache, made.parallel
    assert (model.path, model.dtype, model.quantization) == ("model@v2", "float16", "auto")
    assert (model.max_model_len, model.seed, model.trust_remote_code) == (99, 5, True)
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (2, 3)
    assert (parallel.executor, parallel.cuda_graphs) == ("multiprocess", False)
    assert (cache.dtype, cache.block_size, cache.gpu_memory_utilization) == ("fp8", 64, 0.5)
    assert not cache.enable_prefix_caching
    assert made.scheduler.max_num_seqs == 7
    assert made.served_model_names == ["short"]
    assert made.model.has_tokenizer
    assert not config(skip_tokenizer_init=True).model.has_tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_paralel_size": 2}, "unknown argument .* mean 'tensor_parallel_size'"),
        ({"nothing_like_it": 2}, "unknown argument 'nothing_like_it'; keys"),
        ({"temperature": 0}, "give it to SamplingParams"),
        ({"max_num_seqs": "many"}, "scheduler.max_num_seqs must be integer, not 'many'"),
        ({"quantization": "bitsandbytes"}, "model.quantization must be"),
        ({"enable_lora": True}, "enable_lora=True is not supported"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false, not 1"),
        ({"path": "other"}, "unknown argument 'path'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**arguments)


def test_a_key_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype is given twice"):
        make_config("model", None, {"model.dtype": "auto"}, {"dtype": "float32"})


def test_prompts_are_texts_token_ids_and_dicts_with_either() -> None:
    assert as_prompts("text") == ["text"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts({"prompt": "text"}) == ["text"]
    many = ["text", [1, 2], {"prompt_token_ids": [3], "prompt": None}, ()]
    assert as_prompts(many) == ["text", [1, 2], [3], ()]
    assert as_prompts([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "not a value of type int"),
        ([None], "not a value of type NoneType"),
        ([b"text"], "not a value of type bytes"),
        ([["text"]], "not a list of str"),
        ({"text": "x"}, '{"prompt": TEXT}'),
        ({"prompt": "x", "multi_modal_data": {}}, '{"prompt": TEXT}'),
    ],
)
def test_a_wrong_prompt_is_described(prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        as_prompts(prompts)


def test_conversations_are_messages_and_texts() -> None:
    message = {"role": "user", "content": "Hello"}
    for one in ("Hello", message, [message], ["Hello"], [[message]]):
        assert as_conversations(one) == [[message]]
    assert as_conversations(["Hello", [message, message]]) == [[message], [message, message]]


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        (5, "not a value of type int"),
        ([None], "not a value of type NoneType"),
        ([{"content": "x"}], r"messages\[0\] must be a dict .* not a dict with 'content'"),
        ([[{"role": "user"}, "x"]], r"messages\[1\] must be a dict .* not a value of type str"),
    ],
)
def test_a_wrong_conversation_is_described(conversations: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        as_conversations(conversations)


def test_further_arguments_of_a_chat_are_known() -> None:
    given = {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": None}
    assert as_chat_options(given) == {"template_kwargs": {"a": 1}}
    with pytest.raises(RequestError, match=r"'template_kwarg' of a chat .* 'template_kwargs'"):
        as_chat_options({"template_kwarg": {}})


def test_sampling_parameters_may_be_a_dict() -> None:
    params = SamplingParams(temperature=0.5, include_stop=True, stop="x")
    given = {"temperature": 0.5, "include_stop_str_in_output": True, "stop": ["x"]}
    assert as_params(given) == params
    assert as_params(params) is params
    assert as_params(BeamSearchParams(beam_width=3)).beam_search == BeamSearch(3)
    assert params_of_each(given, 2) == [params, params]
    assert params_of_each([params, {}], 2) == [params, SamplingParams()]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_token": 5}, "'max_token' .did you mean 'max_tokens'"),
        ({"stop": 5}, "stop must be a text or a list of texts, not 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must hold token ids, not be 5"),
        ({"logit_bias": [5]}, "logit_bias must be a dict"),
        (5, "not a value of type int"),
        ([{}], "params must be one for each request: 1 for 2"),
    ],
)
def test_wrong_sampling_parameters_are_named(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        params_of_each(params, 2)
