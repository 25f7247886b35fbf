"""Fields that other servers' clients send and that are refused here.

A field that is declared in `protocol` is supported, or ignored since it changes nothing in the
text. Of the others, those that would change the answer are refused by name. So are names that
nobody knows, in OpenAI's words: a misspelt `temperature` must not be answered as if it had counted
(`server.unknown_fields` = "ignore" has them ignored, as vLLM does). `decoding` looks names up here;
docs/api.md shows the tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from aioinfer.errors import RequestError

#: Fields that would change the answer, and the values with which they do not, beside null.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"], []),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "chat_template": (),
    "detokenize": (True,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "structural_tag": (),
    "vllm_xargs": ({},),
    # llama.cpp, SGLang and others
    "custom_logit_processor": (),
    "custom_params": ({},),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "enable_thinking": (),
    "input_ids": (),
    "lora": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "regex": (),
    "repeat_penalty": (1,),
    "return_hidden_states": (False,),
    "samplers": (),
    "session_params": (),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "thinking": (),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # of completions or of chat alone, where the other does not have them
    "add_special_tokens": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
}

#: What to use in place of a field.
_INSTEAD = {
    "enable_thinking": 'chat_template_kwargs, as in {"enable_thinking": false}',
    "lora": "the adapter's name as the model",
    "lora_path": "the adapter's name as the model",
    "repeat_penalty": "repetition_penalty",
    "input_ids": "completions with token ids as the prompt",
}


def check_undeclared(
    name: str, value: Any, declared: Iterable[str], *, ignores_unknown: bool
) -> None:
    """Raises `RequestError` naming a field that is not one of those that are `declared`, unless its
    value changes nothing. With `ignores_unknown` names that nobody knows are ignored."""
    if value is None:
        return
    if name in REFUSED:
        # for Python 0 is False
        if any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in REFUSED[name]
        ):
            return
        instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise RequestError(
            f"{name} is not supported here{instead}", param=name, code="unsupported_parameter"
        )
    if ignores_unknown:
        return
    near = difflib.get_close_matches(name, declared, 1) if len(name) < 64 else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise RequestError(
        f"Unrecognized request argument supplied: {name}{hint}",
        param=name,
        code="unknown_parameter",
    )
