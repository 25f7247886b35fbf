"""Filling a model: from one file, from shards, at random; and the message for each way in which
files can be wrong."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models import loader
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model, load_model_config
from tests.tiny_models import tiny_model

Tensors = dict[str, torch.Tensor]
open_tensors = loader.open_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path, attention_bias=True)


def load(
    folder: Path,
    load_format: str = "auto",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    size: int = 1,
) -> CausalLM:
    model = build_model(folder, Backend(torch.device("cpu"), dtype, ParallelGroup(rank, size)))
    load_weights(list(model.weight_shards()), folder, load_format, seed, lambda done, total: None)
    return model


def loaded(model: CausalLM) -> Tensors:
    return {name: shard.destination for name, shard in model.weight_shards()}


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same(model: CausalLM, tensors: Tensors) -> None:
    found = loaded(model)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)


def shard(folder: Path) -> Tensors:
    """Distributes the tensors over three files, as large checkpoints are; returns them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {
        name: f"model-{number % 3 + 1:05}-of-00003.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in set(place.values()):
        save_file(
            {name: tensor for name, tensor in tensors.items() if place[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return tensors


def test_one_file(folder: Path):
    assert_same(load(folder), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("threads", [1, 3])
def test_shards(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "reading_threads", lambda device: threads)
    tensors = shard(folder)
    save_file({"consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert_same(load(folder), tensors)


def test_the_same_weights_under_other_names_are_left_alone(folder: Path):
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert_same(load(folder), load_file(folder / "model.safetensors"))


def test_a_file_by_any_name(folder: Path):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_same(load(folder), load_file(folder / "weights.safetensors"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_converted(folder: Path, dtype: torch.dtype):
    assert_same(
        load(folder, dtype=dtype),
        {
            name: tensor.to(dtype)
            for name, tensor in load_file(folder / "model.safetensors").items()
        },
    )


def test_ranks_take_their_parts(folder: Path):
    whole = load_file(folder / "model.safetensors")
    ranks = [loaded(load(folder, rank=rank, size=2)) for rank in range(2)]
    columns = {name for name in whole if name.endswith(("o_proj.weight", "down_proj.weight"))}
    for name, tensor in whole.items():
        if "norm" in name or name.endswith("o_proj.bias"):
            parts = [ranks[0][name]]
            assert torch.equal(parts[0], ranks[1][name])
        else:
            parts = [rank[name] for rank in ranks]
        assert torch.equal(torch.cat(parts, dim=int(name in columns)), tensor), name


class CountedSlices:
    """An open safetensors file, or one tensor in it, which counts the bytes of the slices that are
    taken."""

    def __init__(self, opened: Any, taken: Counter[str], name: str = ""):
        self._opened, self._taken, self._name = opened, taken, name

    def __enter__(self) -> CountedSlices:
        return CountedSlices(self._opened.__enter__(), self._taken)

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_slice(self, name: str) -> CountedSlices:
        return CountedSlices(self._opened.get_slice(name), self._taken, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._opened[index]
        self._taken[self._name] += part.nbytes
        return part


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_parts_alone(folder: Path, size: int, monkeypatch: pytest.MonkeyPatch):
    """What several ranks read are norms, the biases of sums, and KV heads that they share."""
    whole = {
        name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()
    }
    taken = [Counter[str]() for _ in range(size)]
    for rank in range(size):
        monkeypatch.setattr(
            loader,
            "open_file",
            lambda file, rank=rank: CountedSlices(open_tensors(file), taken[rank]),
        )
        load(folder, rank=rank, size=size)
    sharers = {
        name: size if "norm" in name or name.endswith("o_proj.bias") else 1 for name in whole
    }
    # there are two KV heads
    sharers |= {
        name: max(1, size // 2) for name in whole if ".k_proj." in name or ".v_proj." in name
    }
    for counted in taken:
        assert counted == {name: nbytes * sharers[name] // size for name, nbytes in whole.items()}


def test_tensors_that_are_computed_or_tied_may_lie_there(tmp_path: Path):
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(512, 64),
    }
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "lm_head.weight" not in loaded(load(folder))


def test_a_head_that_is_neither_stored_nor_named_is_the_embedding(tmp_path: Path):
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=True)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    tied = config.pop("tie_word_embeddings")
    expected = loaded(load(folder))
    for fields in ({}, {"tie_word_embeddings": None}):
        file.write_text(json.dumps(config | fields))
        assert load_model_config(folder).tied_embeddings is tied
        assert loaded(load(folder)).keys() == expected.keys()
    file.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"missing \(lm_head\.weight\)"):
        load(folder)
    file.write_text(json.dumps(config))
    head = torch.ones(512, 64)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(loaded(load(folder))["lm_head.weight"], head)


def test_progress_ends_at_the_total(folder: Path):
    for load_format in ("auto", "dummy"):
        model, reports = (
            build_model(
                folder, Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
            ),
            [],
        )
        load_weights(
            list(model.weight_shards()),
            folder,
            load_format,
            0,
            lambda done, total, reports=reports: reports.append((done, total)),
        )
        assert reports == sorted(reports)
        assert reports[-1] == (model.weights_bytes, model.weights_bytes)


def test_random_weights_follow_the_seed(folder: Path):
    (folder / "model.safetensors").unlink()
    first, again, other = (loaded(load(folder, "dummy", seed)) for seed in (7, 7, 8))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if tensor.ndim > 1:
            assert not torch.equal(tensor, other[name])
            assert 0.015 < tensor.std() < 0.025
        elif "norm" in name:
            assert (tensor == 1).all()


def test_skewed_weights_need_experts(folder: Path):
    with pytest.raises(ConfigError, match="'dummy_skewed' needs a mixture of experts"):
        load(folder, "dummy_skewed")


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"1 missing \({re.escape(Q)}\)$"),
        (
            lambda t: [t.pop(name) for name in list(t) if "mlp" in name],
            r"6 missing \(model\.layers\.0\.mlp\S+, \S+, \S+, \.\.\.\)$",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing \(lm_head\.weight\)"),
        (
            lambda t: t.update({"model.layers.2.x": torch.zeros(1)}),
            r"1 unknown \(model\.layers\.2\.x\)$",
        ),
        (
            lambda t: t.update({Q + "_scale_inv": t.pop(Q)}),
            rf"1 missing \({re.escape(Q)}\); 1 "
            rf"unknown \({re.escape(Q)}_scale_inv\)",
        ),
        (
            lambda t: t.update({Q: torch.zeros(128, 63)}),
            rf"{re.escape(Q)} has the shape \[128, "
            rf"63\]; .*\[128, 64\]",
        ),
        (
            lambda t: t.update({Q: torch.zeros(144, 64)}),
            rf"{re.escape(Q)} has the shape \[144, "
            rf"64\]; .*\[128, 64\]",
        ),
        (lambda t: t.update({Q: torch.zeros(128 * 64)}), rf"{re.escape(Q)} has the shape \[8192\]"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(500, 64)}),
            r"lm_head\.weight has the "
            r"shape \[500, 64\]; .*\[512, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model\.norm\.weight has "
            r"the shape \[65\]",
        ),
    ],
    ids=[
        "missing", "many", "head", "unknown", "quantized", "columns", "rows", "dimensions",
        "vocabulary", "norm",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2])
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[Tensors], object], message: str, size: int
):
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=message):
        load(folder, size=size)


def test_files_that_cannot_be_read(folder: Path):
    tensors = shard(folder)
    lost = folder / "model-00002-of-00003.safetensors"
    whole = lost.read_bytes()
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        load(folder)
    lost.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=lost.name):
        load(folder)
    lost.write_bytes(whole)
    assert_same(load(folder), tensors)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read.*weight_map"):
        load(folder)


def test_a_folder_without_weights(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no safetensors files.*'dummy'"):
        load(folder)
