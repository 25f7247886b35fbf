"""Reads a model of CTranslate2 (its binary format, version 6), and writes a Whisper model that is
one as a checkpoint of transformers."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
#: Modules of an encoder's layer and of a decoder's, below the layer, in both formats; of a merged
#: projection several.
_ENCODER = {
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": [f"self_attn.{name}_proj" for name in ("q", "k", "v")],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
_DECODER = {
    **_ENCODER,
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": [f"encoder_attn.{name}_proj" for name in ("k", "v")],
    "attention/linear_2": ["encoder_attn.out_proj"],
}
_OUTSIDE = {
    "encoder/layer_norm": "encoder.layer_norm", "decoder/layer_norm": "decoder.layer_norm",
    "encoder/conv1": "encoder.conv1", "encoder/conv2": "encoder.conv2",
    "decoder/embeddings": "decoder.embed_tokens",
}  # fmt: skip
_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def read_tensors(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and the values of a model's variables."""
    place = 0

    def take(form: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal place
        size = take("H")
        place += size
        return data[place - size : place].rstrip(b"\0").decode()

    assert take("I") == 6
    text()  # the name of the specification
    take("I")  # and its revision
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        dtype, size = _DTYPES[take("B")], take("I")
        yield (
            name,
            np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, place).reshape(shape),
        )
        place += size


def convert_whisper(source: Path, folder: Path) -> None:
    """Writes the model in `source` (`model.bin`, `config.json`, `tokenizer.json`) to `folder`."""
    variables = dict(read_tensors((source / "model.bin").read_bytes()))
    tensors: dict[str, np.ndarray] = {}
    for name, values in variables.items():
        for own, part in _renamed(name, values):
            tensors[own] = np.ascontiguousarray(part)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "tokenizer.json", folder)
    embedding = tensors["model.decoder.embed_tokens.weight"]
    layers = {
        side: 1
        + max(int(n) for n in re.findall(rf"model\.{side}\.layers\.(\d+)", " ".join(tensors)))
        for side in ("encoder", "decoder")
    }
    heads = {side: int(variables[f"{side}/num_heads"]) for side in layers}
    size = embedding.shape[1]
    config = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
        "vocab_size": len(embedding), "d_model": size,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        **{f"{side}_layers": count for side, count in layers.items()},
        **{f"{side}_attention_heads": count for side, count in heads.items()},
        **{f"{side}_ffn_dim": len(tensors[f"model.{side}.layers.0.fc1.bias"]) for side in layers},
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
        "decoder_start_token_id": 50258, "eos_token_id": 50257, "bos_token_id": 50257,
        "pad_token_id": 50257, "dtype": "float16", "is_encoder_decoder": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    given = json.loads((source / "config.json").read_text())
    generation = {
        "suppress_tokens": given["suppress_ids"], "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": given["suppress_ids_begin"], "is_multilingual": True,
        "alignment_heads": given["alignment_heads"],
        "decoder_start_token_id": 50258, "eos_token_id": 50257, "no_timestamps_token_id": 50363,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def _renamed(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of transformers' checkpoint in a variable."""
    if found := re.fullmatch(r"(encoder|decoder)/position_encodings/encodings", name):
        yield f"model.{found[1]}.embed_positions.weight", values
    module, _, end = name.rpartition("/")
    if module in _OUTSIDE:
        yield f"model.{_OUTSIDE[module]}.{_ENDS[end]}", values
    if found := re.fullmatch(r"(encoder|decoder)/layer_(\d+)/(.+)", module):
        side, number, below = found.groups()
        modules = (_ENCODER if side == "encoder" else _DECODER)[below]
        for own, part in zip(modules, np.split(values, len(modules)), strict=True):
            if own.endswith("k_proj") and end == "bias":
                assert not part.any()  # Whisper has none
            else:
                yield f"model.{side}.layers.{number}.{own}.{_ENDS[end]}", part
