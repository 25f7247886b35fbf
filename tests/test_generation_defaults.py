"""End tokens and default sampling parameters from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioinfer.errors import ConfigError, RequestError
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.generation_defaults import GenerationDefaults
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import smollm2_folder

QWEN3 = {
    "bos_token_id": 151643, "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def test_a_model_with_all_fields(tmp_path: Path):
    defaults = GenerationDefaults.load(
        write(tmp_path, generation_config=QWEN3, config={"eos_token_id": 1})
    )
    assert defaults.eos_token_ids == (151645, 151643)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_a_request_goes_before_the_defaults(tmp_path: Path):
    given = {"min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 512, "top_p": None}
    defaults = GenerationDefaults.load(write(tmp_path, generation_config=QWEN3 | given))
    assert defaults.sampling_params(temperature=0, stop=("x",)) == SamplingParams(
        temperature=0, top_k=20, min_p=0.1, repetition_penalty=1.1, stop=("x",)
    )
    assert defaults.max_tokens == 512
    with pytest.raises(RequestError, match="top_k"):
        defaults.sampling_params(top_k=-7)


def test_the_configuration_goes_before_the_model_and_behind_the_request(tmp_path: Path):
    folder = write(tmp_path, generation_config=QWEN3 | {"max_new_tokens": 512})
    configured = {"temperature": 0.2, "presence_penalty": 0.5, "max_tokens": 100}
    defaults = GenerationDefaults.load(folder, None, configured)
    assert defaults.max_tokens == 100
    assert defaults.sampling_params(presence_penalty=1.0) == SamplingParams(
        temperature=0.2, top_k=20, top_p=0.95, presence_penalty=1.0
    )
    assert GenerationDefaults.load(folder).sampling["temperature"] == 0.6
    assert configured["max_tokens"] == 100, "the configuration itself is left as it was"


def test_end_tokens_from_where_they_are_named(tmp_path: Path, tokenizer_cache: Path):
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache))
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults((), {})
    assert GenerationDefaults.load(tmp_path, tokenizer).eos_token_ids == (2,)
    assert GenerationDefaults.load(
        write(tmp_path, config={"eos_token_id": [7, 8]}), tokenizer
    ).eos_token_ids == (7, 8)
    assert GenerationDefaults.load(
        write(tmp_path, generation_config={"eos_token_id": None}), tokenizer
    ).eos_token_ids == (7, 8)
    assert GenerationDefaults.load(
        write(tmp_path, generation_config={"eos_token_id": 0}), tokenizer
    ).eos_token_ids == (0,)
    folder = write(tmp_path, generation_config={"eos_token_id": [7, 9]})
    assert GenerationDefaults.load(folder, end_ids=(9, 3)).eos_token_ids == (7, 9, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"top_p": 2}, {"top_k": "many"}, {"eos_token_id": "</s>"},
        {"eos_token_id": ["</s>"]},
    ],
)  # fmt: skip
def test_values_that_no_request_could_have(tmp_path: Path, wrong: dict[str, object]):
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        GenerationDefaults.load(write(tmp_path, generation_config=wrong))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str):
    (tmp_path / "generation_config.json").write_text(content, "latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        GenerationDefaults.load(tmp_path)
