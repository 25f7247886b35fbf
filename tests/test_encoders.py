"""Every family of encoders against transformers: hidden states of texts of mixed lengths, on one
rank and on two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.step import SampledRows, Step
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.registry import load_model_config
from tests.encoder_models import FAMILIES, random_texts, tiny_encoder, word_pieces
from tests.paged_model import load_model, make_step
from tests.rank_processes import run_ranks

VOCAB = word_pieces().get_vocab_size()
TEXTS = random_texts([20, 5, 120, 6, 5, 1, 33], VOCAB)


def make_texts_step(texts: list[list[int]]) -> Step:
    lengths = [len(text) for text in texts]
    tables = [[0] * 32 for _ in texts]
    ids = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
    return make_step(tables, [0] * len(texts), lengths, 16, ids)


@torch.inference_mode()
def hidden_states(model: CausalLM, texts: list[list[int]]) -> torch.Tensor:
    """Returns the hidden states of all tokens, and checks that those of the last tokens alone are
    the same."""
    step = make_texts_step(texts)
    model.plan(step)
    states = model.normed(model.finish_all(step, model.begin(step)))
    again = make_texts_step(texts)
    rows = torch.arange(len(texts))
    last = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    again.sampled = SampledRows.of(again.inputs, rows, last)
    assert torch.equal(model.normed(model.finish(again, model.begin(again))), states[last])
    return states


@torch.inference_mode()
def expected_states(reference: Any, texts: list[list[int]]) -> torch.Tensor:
    base = getattr(reference, reference.base_model_prefix)
    return torch.cat([base(torch.tensor([text])).last_hidden_state[0] for text in texts])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = tiny_encoder(family, tmp_path)
    expected = expected_states(reference, TEXTS)
    model = load_model(tmp_path, ParallelGroup.single())
    assert not model.scores_tokens
    assert model.kv_specs == [()] * len(model.layer_numbers)
    assert torch.allclose(hidden_states(model, TEXTS), expected, atol=2e-5)
    # texts do not see each other, and their order changes nothing
    alone = torch.cat([hidden_states(model, [text]) for text in TEXTS])
    assert torch.allclose(alone, expected, atol=2e-5)


def test_an_encoder_without_a_head_has_other_names(tmp_path: Path) -> None:
    """Of tensors; and the first checkpoints of BERT have others for norms."""
    for family in ("bert", "modernbert"):
        folder = tmp_path / family
        reference = tiny_encoder(family, folder)
        expected = expected_states(reference, TEXTS[:2])
        prefix = f"{reference.base_model_prefix}."
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if family == "bert":
            renamed = {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                    "LayerNorm.bias", "LayerNorm.beta"
                ): tensor
                for name, tensor in renamed.items()
            }
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        kind = config["architectures"][0].replace("ForSequenceClassification", "Model")
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        model = load_model(folder, ParallelGroup.single())
        assert torch.allclose(hidden_states(model, TEXTS[:2]), expected, atol=2e-5)


def test_token_types(tmp_path: Path) -> None:
    reference = tiny_encoder("bert", tmp_path)
    model = load_model(tmp_path, ParallelGroup.single())
    assert model.has_token_types
    text, types = TEXTS[0], [0] * 8 + [1] * 12
    with torch.inference_mode():
        expected = reference.bert(
            torch.tensor([text]), token_type_ids=torch.tensor([types])
        ).last_hidden_state[0]
        step = make_texts_step([text, TEXTS[1]])
        of_others = [0] * len(TEXTS[1])
        token_types = torch.tensor(types + of_others, dtype=torch.int32)
        step.inputs = replace(step.inputs, token_types=token_types)
        states = model.finish_all(step, model.begin(step))[: len(text)]
    assert torch.allclose(states, expected, atol=2e-5)


def test_two_ranks_share_an_encoder(tmp_path: Path) -> None:
    folders = []
    for family in ("bert", "mpnet", "modernbert"):
        folders.append(tmp_path / family)
        tiny_encoder(family, folders[-1])
    scratch = tmp_path / "ranks"
    scratch.mkdir()
    torch.save(folders, scratch / "job")
    found = run_ranks(_compute, 2, scratch)
    for number, folder in enumerate(folders):
        expected = hidden_states(load_model(folder, ParallelGroup.single()), TEXTS)
        for of_rank in found:
            assert torch.allclose(of_rank[number], expected, atol=2e-5)


def _compute(rank: int, size: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    folders = torch.load(scratch / "job", weights_only=False)
    store = dist.FileStore(str(scratch / "store"), size)
    group = ParallelGroup.connect(rank, size, store, torch.device("cpu"))
    found = [hidden_states(load_model(folder, group), TEXTS) for folder in folders]
    torch.save(found, scratch / f"rank-{rank}-of-{size}")


# -------------------------------------------------------------------- configurations


def test_lengths(tmp_path: Path) -> None:
    """RoBERTa's positions begin behind the padding token's; sentence-transformers may be content
    with fewer tokens, unless the configuration names a number."""
    tiny_encoder("roberta", tmp_path)
    assert load_model_config(tmp_path).max_len == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert load_model_config(tmp_path).max_len == 100
    assert load_model_config(tmp_path, ModelConfig(path="", max_model_len=300)).max_len == 512


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"pad_token_id": 600}, "pad_token_id"),
        ("modernbert", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_refused(
    family: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny_encoder(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=named):
        load_model_config(tmp_path)


def test_an_encoder_has_one_stage(tmp_path: Path) -> None:
    tiny_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2 is not supported"):
        load_model_config(tmp_path).check_pipeline_parallel(2)
    with pytest.raises(ConfigError, match="does not divide"):
        load_model_config(tmp_path).check_tensor_parallel(3)
