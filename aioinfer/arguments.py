"""Arguments of `LLM`, `AsyncLLM` and `LLMEngine`, as programs write them: engine arguments by
vLLM's names, prompts, conversations and sampling parameters.

Each function returns values in the form that the rest of the package takes, or raises an error of
one line that says what to write.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from aioinfer.config import Config, describe_keys, load_config
from aioinfer.config_keys import nearest
from aioinfer.errors import ConfigError, RequestError
from aioinfer.sampling_params import BeamSearchParams, SamplingParams

Prompt = str | Sequence[int]
#: A prompt, or one in vLLM's form: `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`.
GivenPrompt = Prompt | Mapping[str, Any]
GivenParams = SamplingParams | BeamSearchParams | Mapping[str, Any]
Message = Mapping[str, Any]
#: The messages of a conversation; a text stands for a user's message.
Conversation = str | Message | Sequence[Message]

#: The sections with keys that are arguments by their own names; of two keys of one name the first.
_SECTIONS = ("model", "cache", "scheduler", "parallel", "chat", "pooling")
#: vLLM's names of other keys.
_KEYS = {
    "cpu_offload_gb": "model.offload_gb",
    "distributed_executor_backend": "parallel.executor",
    "enable_expert_parallel": "parallel.expert_parallel",
    "enable_sleep_mode": "model.sleep_mode",
    "kv_cache_dtype": "cache.dtype",
    "mamba_ssm_cache_dtype": "cache.state_dtype",
    "num_gpu_blocks_override": "cache.num_blocks",
    "override_generation_config": "model.sampling",
    "served_model_name": "server.served_model_names",
    "skip_tokenizer_init": "model.tokenizer",
    "worker_extension_cls": "parallel.worker_extension",
}
#: vLLM's names of keys that say the opposite.
_OPPOSITES = {
    "enforce_eager": "parallel.cuda_graphs",
}
#: vLLM's names of values, by key. A checkpoint says itself how it is quantized.
_VALUES: dict[str, dict[Any, str]] = {
    "cache.dtype": {"fp8_e4m3": "fp8"},
    "cache.state_dtype": {"auto": "float32"},
    "model.dtype": {"half": "float16", "float": "float32"},
    "model.quantization": dict.fromkeys(
        ("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin", "mxfp4"), "auto"
    ),
    "parallel.executor": {"mp": "multiprocess", "uni": "inline"},
}
#: vLLM's arguments that change nothing here, with the values for which that holds.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (True, False),
    "disable_cascade_attn": (False, True),
    "disable_custom_all_reduce": (True, False),
    "disable_log_stats": (True, False),
    "enable_chunked_prefill": (True,),
    "enable_lora": (False,),
    "scheduling_policy": ("fcfs", "priority"),
    "skip_tokenizer_init": (False,),
    "swap_space": (0, 4),
    "tokenizer_mode": ("auto",),
}
#: vLLM's names of fields of `SamplingParams`.
_FIELDS = {"include_stop_str_in_output": "include_stop"}
#: Further arguments of `chat` besides tools: arguments of `Tokenizer.render_chat`, and vLLM's name
#: of one.
_CHAT_OPTIONS = {
    name: name
    for name in (
        "add_generation_prompt", "continue_final_message", "parse_special", "template_kwargs",
        "max_tokens",
    )
} | {"chat_template_kwargs": "template_kwargs"}  # fmt: skip


def make_config(
    model: str | Path | None,
    file: str | Path | None,
    settings: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Config:
    """Returns the configuration of a model.

    Args:
        model: `model.path`, or None if `file` has it.
        file: a TOML file to start from, or None.
        settings: values by dotted key.
        arguments: values by vLLM's names, or by the last part of a key; None is no value. With a
            `model`, its `revision` among them.

    Raises `ConfigError`.
    """
    values, arguments = dict(settings or {}), dict(arguments)
    if model is not None:
        revision = arguments.pop("revision", None)
        values["model.path"] = f"{model}@{revision}" if revision else str(model)
    for name, value in arguments.items():
        dotted = None if value is None else _key_of(name, value)
        if dotted is None:
            continue
        if dotted in values:
            raise ConfigError(f"{dotted} is given twice, once as {name!r}")
        values[dotted] = _value_of(name, dotted, value)
    return load_config(file, values)


def option_hint(words: Sequence[str]) -> str:
    """Returns what to write for an option that the command line does not have, if it is vLLM's name
    of a key, or is a key or near to one: "; write --set SECTION.KEY=VALUE", otherwise nothing.

    `words` begin with the option; its value may be behind `=` or be the next word.
    """
    option, _, value = words[0].partition("=")
    if not option.startswith("--"):
        return ""
    name = option[2:].replace("-", "_")
    kinds = {dotted: kind for dotted, kind, *_ in describe_keys()}
    keys = {dotted.partition(".")[2]: dotted for dotted in kinds} | _known_keys()
    keys["model"] = "model.path"
    if not value and len(words) > 1 and not words[1].startswith("-"):
        value = words[1]
    if (value or "true").lower() in (str(each).lower() for each in _WITHOUT_EFFECT.get(name, ())):
        return f"; {option} changes nothing here: leave it out"
    if name not in keys:
        return nearest(name, kinds)
    key = keys[name]
    if name == "skip_tokenizer_init":
        value = "none"
    elif kinds[key] == "boolean":
        value = "false" if name in _OPPOSITES else value or "true"
    elif kinds[key].startswith("list"):
        value = f'["{value}"]'
    setting = f"{key}={value or 'VALUE'}"
    return f"; write --set {shlex.quote(setting)}"


def _known_keys() -> dict[str, str]:
    """Returns the keys that are arguments, by the arguments' names."""
    known: dict[str, str] = {}
    for dotted, *_ in describe_keys():
        section, _, last = dotted.partition(".")
        if section in _SECTIONS and last not in ("path", "type"):
            known.setdefault(last, dotted)
    return known | _KEYS | _OPPOSITES


def _key_of(name: str, value: Any) -> str | None:
    """Returns the key that an argument stands for, None for one without effect. Raises
    `ConfigError`."""
    known = _known_keys()
    if value in _WITHOUT_EFFECT.get(name, ()):
        return None
    if name in known:
        return known[name]
    if name in _WITHOUT_EFFECT:
        raise ConfigError(f"{name}={value!r} is not supported")
    if name in {item.name for item in fields(SamplingParams)} | _FIELDS.keys():
        raise ConfigError(
            f"{name!r} is an argument of requests, not of the model: give it to SamplingParams"
        )
    raise ConfigError(
        f"unknown argument {name!r}{_meant(name, [*known, *_WITHOUT_EFFECT])}; keys of the "
        "configuration that are no arguments go into settings={'section.key': value}"
    )


def _value_of(name: str, dotted: str, value: Any) -> Any:
    """Returns the value of a key for the value of an argument."""
    if name in _OPPOSITES:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
        return not value
    if name == "skip_tokenizer_init" and value is True:
        return "none"
    if isinstance(value, Path):
        return str(value)
    if dotted == "server.served_model_names" and isinstance(value, str):
        return [value]
    if dotted in ("model.dtype", "cache.dtype") and not isinstance(value, str):
        value = str(value).removeprefix("torch.")
    return _VALUES.get(dotted, {}).get(value, value) if isinstance(value, str) else value


def _meant(wrong: str, known: Sequence[str]) -> str:
    """Returns " (did you mean ...?)" with the nearest known name, or nothing if none is near."""
    found = get_close_matches(wrong, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def as_prompts(prompts: GivenPrompt | Sequence[GivenPrompt]) -> list[Prompt]:
    """Returns one prompt or many as a list. Raises `RequestError`."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [as_prompt(cast(GivenPrompt, prompts))]
    if not isinstance(prompts, Sequence):
        return [as_prompt(prompts)]  # which raises the error
    return [as_prompt(cast(GivenPrompt, prompt)) for prompt in prompts]


def as_prompt(prompt: GivenPrompt) -> Prompt:
    """Returns a prompt as the engine takes it. Raises `RequestError`."""
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        ids = given.pop("prompt_token_ids", None)
        text = given.pop("prompt", None)
        if given or (ids is None and text is None):
            raise RequestError(
                'a prompt that is a dict must be {"prompt": TEXT} or {"prompt_token_ids": IDS}',
                param="prompt",
            )
        return as_prompt(text if ids is None else ids)
    if isinstance(prompt, str) or _are_token_ids(prompt):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and not prompt:
        return prompt  # no token: the engine says so
    raise RequestError(
        f"a prompt must be a text or a list of token ids, not {_described(prompt)}", param="prompt"
    )


def _are_token_ids(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return is_list and len(given) > 0 and isinstance(given[0], Integral)


def as_conversations(
    conversations: Conversation | Sequence[Conversation],
) -> list[Sequence[Message]]:
    """Returns one conversation or many as a list. Raises `RequestError`."""
    is_list = isinstance(conversations, Sequence) and not isinstance(conversations, str)
    is_one = not is_list or (len(conversations) > 0 and isinstance(conversations[0], Mapping))  # type: ignore[index]
    many = [conversations] if is_one else conversations
    return [as_conversation(each) for each in cast(Sequence[Conversation], many)]


def as_conversation(conversation: Conversation) -> Sequence[Message]:
    """Returns the messages of a conversation. Raises `RequestError`."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    messages = [conversation] if isinstance(conversation, Mapping) else conversation
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise RequestError(
            "a conversation must be a text or a list of messages, not " + _described(messages),
            param="messages",
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f'messages[{number}] must be a dict such as {{"role": "user", "content": TEXT}}, '
                f"not {_described(message)}",
                param=f"messages[{number}]",
            )
    return messages


def as_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Returns each query with its document; one query goes with all documents. Raises
    `RequestError`."""
    second = [documents] if isinstance(documents, str) else documents
    first = [queries] * len(second) if isinstance(queries, str) else queries
    if len(first) != len(second):
        raise RequestError(f"{len(first)} queries and {len(second)} documents", param="documents")
    return list(zip(first, second, strict=True))


def as_chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns further arguments of a chat by the names that the tokenizer knows. Raises
    `RequestError`."""
    for name in options.keys() - _CHAT_OPTIONS.keys():
        raise RequestError(
            f"unknown argument {name!r} of a chat{_meant(name, list(_CHAT_OPTIONS))}", param=name
        )
    return {_CHAT_OPTIONS[name]: value for name, value in options.items() if value is not None}


def as_params(params: GivenParams) -> SamplingParams:
    """Returns sampling parameters: a dict's fields, by vLLM's names too. Raises `RequestError`."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, BeamSearchParams):
        return params.sampling_params()
    if not isinstance(params, Mapping):
        raise RequestError(
            f"sampling parameters must be SamplingParams or a dict, not {_described(params)}",
            param="params",
        )
    known = {item.name: item.name for item in fields(SamplingParams)} | _FIELDS
    for name in params.keys() - known.keys():
        raise RequestError(
            f"unknown sampling parameter {name!r}{_meant(str(name), list(known))}", param=str(name)
        )
    return SamplingParams(**{known[name]: value for name, value in params.items()})


def params_of_each(
    params: GivenParams | Sequence[GivenParams], num_requests: int
) -> list[SamplingParams]:
    """Returns the sampling parameters of each request: one for all, or as many as there are
    requests. Raises `RequestError`."""
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [as_params(params)] * num_requests
    check_count("params", params, num_requests)
    return [as_params(each) for each in params]


def check_count(name: str, values: Sequence[Any], num_requests: int) -> None:
    """Raises `RequestError` unless there is a value for each request."""
    if len(values) != num_requests:
        raise RequestError(
            f"{name} must be one for each request: {len(values)} for {num_requests}", param=name
        )


def _described(value: Any) -> str:
    """Returns the type of a value, with its keys or the type of its items where these are wrong as
    well."""
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        return f"a {type(value).__name__} of {type(value[0]).__name__}"
    return f"a value of type {type(value).__name__}"
