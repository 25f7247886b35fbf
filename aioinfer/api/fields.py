"""Tables of request fields that are refused or have no effect, for all dialects of the API.

A field that the body of an endpoint declares is supported there. `REFUSED` has the published fields
of other servers and clients that would change the answer: they are answered 400 by name, unless
their value changes nothing. `NO_EFFECT` has the fields that cannot change the answer here, each
with the reason: they are accepted. Any other name is refused in OpenAI's words: a misspelt
`temperature` must not be answered as if it had counted (`server.unknown_fields` = "ignore" has such
names ignored, as vLLM does). `decoding` looks names up here; docs/api.md shows both tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from aioinfer.errors import RequestError, UnsupportedFieldError

#: By origin: fields that would change the answer, and the values with which they do not, beside
#: null. `add_special_tokens` is vLLM's for completions (chats have the template's), `truncation` is
#: of Responses and of Voyage's embeddings.
REFUSED_BY_ORIGIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "OpenAI": {
        "add_special_tokens": (False,), "audio": (), "best_of": (1,),
        "context_management": (
            [], {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "conversation": (), "function_call": ("none", "auto"), "functions": ([],),
        "logprobs": (False, 0), "modalities": (["text"], []), "moderation": (),
        "output_expires_after": (), "personality": (), "prompt": (), "stream": (False,),
        "suffix": ("",), "top_logprobs": (0,), "truncation": ("disabled", False),
        "verbosity": ("medium",), "web_search_options": (),
    },
    "vLLM": {
        "activation": (True,), "cache_salt": (), "chat_template": (), "detokenize": (True,),
        "echo": (False,), "ec_transfer_params": ({},), "embed_dtype": ("float32",),
        "endianness": ("little", "native"), "enable_response_messages": (False,),
        "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (),
        "kv_transfer_params": ({},), "logits_processors": ([],), "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},), "previous_input_messages": ([],), "previous_response": (),
        "prompt_embeds": (), "repetition_detection": (), "return_prompt_text": (False,),
        "return_token_offsets": (False,), "routed_experts_prompt_start": (0,), "softmax": (True,),
        "structural_tag": (), "thinking_token_budget": (-1,), "use_activation": (True,),
        "watermarking": (False,),
    },
    "Anthropic": {
        "compaction": (), "container": (), "diagnostics": ({},), "mcp_servers": ([],),
        "output_format": (), "thinking": (), "thread": (),
    },
    "Ollama": {
        "context": ([],), "penalize_newline": (True,), "shift": (False,), "template": ("",),
    },
    "Cohere, Jina, Voyage, text-embeddings-inference": {
        "embedding_type": ("float",), "embedding_types": (["float"],), "input_type": (),
        "instruction": ("",), "late_chunking": (False,), "max_chunks_per_doc": (),
        "normalized": (True,), "output_dimension": (), "output_dtype": ("float",),
        "rank_fields": ([],), "raw_scores": (False,), "return_embeddings": (False,),
        "return_multivector": (False,), "task": (), "truncate": (False, "NONE"),
        "truncation_direction": ("left", "Left"),
    },
    "llama.cpp, SGLang and others": {
        "custom_logit_processor": (), "custom_params": ({},), "dry_multiplier": (0,),
        "dynatemp_range": (0,), "ebnf": (), "embd_normalize": (2,), "enable_thinking": (),
        "image_data": ([],), "input_ids": (), "lora": ([],), "lora_path": (), "mirostat": (0,),
        "mirostat_mode": (0,), "n_cmpl": (1,), "n_indent": (0,), "n_keep": (0,), "n_probs": (0,),
        "no_stop_trim": (False,), "post_sampling_probs": (False,), "reasoning_format": ("auto",),
        "regex": (), "repeat_penalty": (1,), "response_fields": ([],),
        "return_hidden_states": (False,), "samplers": (), "session_params": (), "stop_regex": (),
        "t_max_predict_ms": (0,), "tfs_z": (1,), "top_a": (0,), "top_n_sigma": (-1,),
        "typical": (1,), "typical_p": (1,), "with_pieces": (False,), "xtc_probability": (0,),
    },
}  # fmt: skip

REFUSED: Mapping[str, tuple[Any, ...]] = {
    name: neutral for fields in REFUSED_BY_ORIGIN.values() for name, neutral in fields.items()
}

#: Fields that are accepted and cannot change an answer here, by the reason.
NO_EFFECT_BY_REASON: dict[str, tuple[str, ...]] = {
    "it says who asks, or how that is billed": (
        "access_programs", "billing_policy", "fallback_credit_token", "safety_identifier", "user",
        "user_profile_id", "workspace_id",
    ),
    "it says where or how fast an operator's servers compute": (
        "background_options", "data_parallel_rank", "inference_geo", "service_tier", "speed",
    ),
    "it is a label for an operator's records": (
        "client_metadata", "metadata", "request_id", "rid", "session_id", "store",
    ),
    "the prefix cache works by itself, for all requests": (
        "cache_control", "cache_prompt", "extra_key", "id_slot", "n_cache_reuse", "n_discard",
        "num_keep", "prompt_cache_options",
    ),
    "it is for loading a model, which the server has done": (
        "embedding_only", "f16_kv", "keep_alive", "logits_all", "low_vram", "main_gpu", "num_batch",
        "num_ctx", "num_gpu", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
    ),
    "it belongs to a method of sampling that is off": (
        "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
        "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold",
    ),
    "it says how events are grouped or what they hold beside the text, where they can": (
        "return_mm_kwargs", "return_progress", "stream_interval", "stream_options",
        "timings_per_token",
    ),
    "every feature that it names has a field of its own": ("betas",),
    "it is for tools that an operator's servers run, and there are none": ("max_tool_calls",),
    "it is for a request that an operator's servers decline": ("fallbacks",),
    "pictures keep all of their embeddings, whatever it says of compression": ("image",),
    "there is one kind of grammars": ("guided_decoding_backend",),
    "a text has no spaces between special tokens that could be left out": (
        "spaces_between_special_tokens",
    ),
}  # fmt: skip

NO_EFFECT: Mapping[str, str] = {
    name: reason for reason, names in NO_EFFECT_BY_REASON.items() for name in names
}

#: Fields that have another name here, where the body declares that.
_RENAMED = {
    "input_type": "prompt_name",
    "instruction": "prompt_name",
    "normalized": "normalize",
    "output_dimension": "dimensions",
    "repeat_penalty": "repetition_penalty",
    "truncate": "truncate_prompt_tokens",
    "truncation": "truncate_prompt_tokens",
    "truncation_direction": "truncation_side",
}
#: The field or option to use in place of a refused field.
_INSTEAD = {
    "enable_thinking": 'chat_template_kwargs, as in {"enable_thinking": false}',
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
        'structured_outputs, as in {"regex": "[a-z]+"}',
    ),
    "input_ids": "completions with token ids as the prompt",
    "lora": "the adapter's name as the model",
    "lora_path": "the adapter's name as the model",
    "return_multivector": "/pooling with pooling_type all",
}


def check_undeclared(
    name: str,
    value: Any,
    declared: Collection[str],
    *,
    ignores_unknown: bool,
    only_misspelt: bool = False,
) -> None:
    """Raises `RequestError` naming a field that is not in `declared`, unless it or its value has no
    effect. With `ignores_unknown` names without an entry are ignored, with `only_misspelt` those
    alone that are not nearly a declared one.

    A field of an object within the body has its path as the `name`, such as `options.tfs_z`.
    """
    field = name.rpartition(".")[2]
    if value is None or field in NO_EFFECT:
        return
    if field in REFUSED:
        # for Python 0 is False
        if any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in REFUSED[field]
        ):
            return
        renamed = _RENAMED.get(field)
        instead = renamed if renamed in declared else _INSTEAD.get(field)
        hint = f"; use {instead}" if instead else ""
        raise UnsupportedFieldError(name, f"is not supported here{hint}")
    if ignores_unknown:
        return
    cutoff = 0.8 if only_misspelt else 0.6
    near = difflib.get_close_matches(field, declared, 1, cutoff) if len(field) < 64 else []
    if only_misspelt and not near:
        return
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise RequestError(
        f"Unrecognized request argument supplied: {name}{hint}",
        param=name,
        code="unknown_parameter",
    )
