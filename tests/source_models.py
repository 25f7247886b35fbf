"""Small random models with an encoder before the decoder, made and saved by transformers, with a
tokenizer; and what transformers generates with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from transformers.generation.utils import GenerateEncoderDecoderOutput

from tests.tiny_models import randomize

_BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
LANGUAGES = ("en", "de", "fr")
#: In Whisper's order, behind the bytes; timestamps follow.
_SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
]  # fmt: skip
_TIMES = [f"<|{number / 50:.2f}|>" for number in range(1501)]
VOCAB = 256 + len(_SPECIAL) + len(_TIMES)
ID = {text: 256 + number for number, text in enumerate([*_SPECIAL, *_TIMES])}
END = ID["<|endoftext|>"]
SECONDS = 2
RATE = 16_000
_SHAPE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "init_std": 0.2,
    "bos_token_id": END, "eos_token_id": END, "pad_token_id": END,
}  # fmt: skip
_T5 = {
    "vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2,
    "num_decoder_layers": 3, "n_positions": 128, "decoder_start_token_id": 0, "eos_token_id": 297,
    "pad_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "initializer_factor": 3.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_SHAPE, "vocab_size": VOCAB, "num_mel_bins": 20, "max_target_positions": 128,
            "max_source_positions": SECONDS * 50,
            "decoder_start_token_id": ID["<|startoftranscript|>"],
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            **_SHAPE, "vocab_size": 300, "max_position_embeddings": 128, "bos_token_id": 296,
            "eos_token_id": 297, "pad_token_id": 298, "decoder_start_token_id": 297,
            "forced_eos_token_id": None, "scale_embedding": True,
        },
    ),
    "t5": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "relu"}),
    "flan_t5": (
        "T5ForConditionalGeneration",
        {
            **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
            "scale_decoder_outputs": False,
        },
    ),
}  # fmt: skip
#: Tokens that Whisper may not sample: at all, and as the first one.
SUPPRESSED, FIRST_SUPPRESSED = [40, 41, *range(END + 1, 256 + len(_SPECIAL))], [32, END]


def save_model(name: str, folder: Path, **fields: Any) -> Any:
    """Saves a model in float32 with its tokenizer. Returns the model of transformers. `fields`
    replace those of its configuration."""
    class_name, given = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**given, **fields})
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomize(model)
    if name == "whisper":
        generation = model.generation_config
        generation.lang_to_id = {f"<|{code}|>": ID[f"<|{code}|>"] for code in LANGUAGES}
        generation.task_to_id = {task: ID[f"<|{task}|>"] for task in ("translate", "transcribe")}
        generation.no_timestamps_token_id = ID["<|notimestamps|>"]
        generation.is_multilingual = True
        generation.max_initial_timestamp_index = 50
        generation.suppress_tokens = SUPPRESSED
        generation.begin_suppress_tokens = FIRST_SUPPRESSED
    if name == "bart":
        model.generation_config.forced_bos_token_id = 296
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def make_tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of bytes and Whisper's special tokens."""
    vocabulary = {character: index for index, character in enumerate(_BYTES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    )
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in _TIMES])
    return backend


def save_tokenizer(folder: Path) -> None:
    """Saves the tokenizer."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Returns samples float32 [n] of some tones in noise."""
    source = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * source.uniform(80, 4000) * times) for _ in range(3))
    return (0.2 * tones + 0.02 * source.standard_normal(len(times))).astype(np.float32)


class Reference(NamedTuple):
    """Tokens, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


def encoder_inputs(name: str, source: Any, model: Any) -> dict[str, torch.Tensor]:
    """Returns the arguments of transformers' model for a source: samples or token ids."""
    if name != "whisper":
        return {"input_ids": torch.tensor([list(source)])}
    extract = transformers.WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=SECONDS
    )
    return {
        "input_features": extract(source, sampling_rate=RATE, return_tensors="pt").input_features
    }


@torch.inference_mode()
def reference_output(
    model: Any, name: str, prompt: Sequence[int], source: Any, count: int
) -> Reference:
    """Returns what transformers generates greedily, each step from the beginning."""
    inputs = encoder_inputs(name, source, model)
    encoded = model.get_encoder()(*inputs.values())
    ids, logprobs = list(prompt), []
    for _ in range(count):
        given = torch.tensor([ids])
        logits = model(encoder_outputs=encoded, decoder_input_ids=given, use_cache=False).logits[
            0, -1
        ]
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1).max()))
        if ids[-1] == model.config.eos_token_id:
            break
    return Reference(ids[len(prompt) :], logprobs)


@torch.inference_mode()
def reference_times(
    model: Any, inputs: dict[str, torch.Tensor], num_samples: int, heads: Sequence[Sequence[int]],
    prompt: Sequence[int], count: int,
) -> list[float]:  # fmt: skip
    """Returns the times of the last `count` tokens of a prompt as transformers has them, whose
    `inputs` are of a sound."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([list(prompt)])
    attentions = model(**inputs, decoder_input_ids=ids, output_attentions=True).cross_attentions
    output = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(attentions,))
    times = model._extract_token_timestamps(
        output, heads, num_frames=torch.tensor([num_samples // 160]),
        num_input_ids=len(prompt) - count,
    )  # fmt: skip
    found: list[float] = times[0, -count - 1 : -1].tolist()
    return found
