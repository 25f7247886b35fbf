"""The stages of a pipeline: how layers are divided, and that stages compute what one model does."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, group_layers, groups_of_stage
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.config import DecoderConfig
from aioinfer.models.registry import build_model, load_model_config
from aioinfer.models.stages import divide_layers, step_bytes
from aioinfer.worker.kv_tensors import KVTensors
from tests.paged_model import CPU, make_step
from tests.tiny_models import FAMILIES, tiny_model

BLOCK_SIZE = 4


def largest(sizes: list[int], stages: list[range], behind: int) -> int:
    loads = [sum(sizes[number] for number in stage) for stage in stages]
    loads[-1] += behind
    return max(loads)


def test_the_largest_stage_is_as_small_as_it_can_be() -> None:
    noise = random.Random(0)
    for _ in range(200):
        count = noise.randint(1, 9)
        sizes = [noise.randint(1, 9) for _ in range(count)]
        num_stages = noise.randint(1, count)
        behind = noise.randint(0, 20)
        divided = divide_layers(sizes, num_stages, behind=behind)
        assert [number for stage in divided for number in stage] == list(range(count))
        assert len(divided) == num_stages
        assert all(divided)
        every = [
            [range(a, b) for a, b in itertools.pairwise((0, *cuts, count))]
            for cuts in itertools.combinations(range(1, count), num_stages - 1)
        ]
        least = min(largest(sizes, stages, behind) for stages in every)
        assert largest(sizes, divided, behind) == least


def test_a_layer_costs_its_weights_and_the_keys_of_a_step() -> None:
    whole, narrow = AttentionSpec(8, 128), AttentionSpec(8, 128, window=64)
    assert step_bytes(1000, [whole], 2) == 1000 + 65_536 * 4096
    assert step_bytes(1000, [narrow], 2) == 1000 + 128 * 64 * 4096
    # the shape of Qwen3-8B: 36 layers of 193 M weights and a head of 622 M, in bf16
    layers = [step_bytes(2 * 193_000_000, [whole], 2)] * 36
    assert [len(stage) for stage in divide_layers(layers, 2, behind=2 * 622_000_000)] == [19, 17]


def build_stage(folder: Path, stage: int, num_stages: int) -> CausalLM:
    backend = Backend(CPU, torch.float32, ParallelGroup.single())
    backend.stage, backend.num_stages = stage, num_stages
    model = build_model(folder, backend)
    model.load(folder, "auto", 0, lambda done, total: None)
    groups = groups_of_stage(group_layers(model.kv_specs), model.layer_numbers)
    kv = KVTensors(groups, [8] * len(groups), BLOCK_SIZE, torch.float32, CPU)
    model.bind(groups, kv.tensors, BLOCK_SIZE, 2, 64)
    return model


def logits_of(stages: list[CausalLM], ids: list[int]) -> torch.Tensor:
    num_groups = len(group_layers(stages[0].kv_specs))
    tables = [[3, 1, 4, 0, 5]]
    step = make_step(tables, [0], [len(ids)], BLOCK_SIZE, torch.tensor(ids).int(), num_groups)
    received = None
    for model in stages:
        model.plan(step)
        received = model.finish(step, model.begin(step, received=received))
    assert received is not None
    return stages[-1].logits(received)


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_compute_what_one_model_does(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, tie_word_embeddings=family in ("qwen2", "gemma2"))
    ids = [5, 9, 77, 300, 2, 41, 8, 8, 120, 64, 3, 11, 200, 7, 19]
    whole = build_stage(folder, 0, 1)
    stages = [build_stage(folder, number, 2) for number in range(2)]
    first, second = (list(model.layer_numbers) for model in stages)
    assert first == [0]
    assert second == list(range(1, len(whole.kv_specs)))
    assert all(list(model.kv_specs) == list(whole.kv_specs) for model in stages)
    assert all(0 < model.weights_bytes < whole.weights_bytes for model in stages)
    with torch.inference_mode():
        assert torch.equal(logits_of(stages, ids), logits_of([whole], ids))


def test_stages_begin_where_they_may() -> None:
    sizes = [5, 5, 5, 5, 5, 5]
    assert divide_layers(sizes, 2, starts=[1, 5]) == [range(1), range(1, 6)]
    assert divide_layers(sizes, 3, starts=[1, 5]) == [range(1), range(1, 5), range(5, 6)]


def test_no_stage_begins_between_a_layer_and_one_that_reads_its_cache(tmp_path: Path) -> None:
    folder = tiny_model("gemma4_text", tmp_path, num_hidden_layers=5)
    config = load_model_config(folder)
    assert isinstance(config, DecoderConfig)
    assert (config.kv_sources, config.stage_starts) == ((None, None, None, 1, 2), (1,))
    with pytest.raises(ConfigError, match=r"size = 3, but .* 5 layers, of which .* set it to 2"):
        build_stage(folder, 0, 3)


def test_each_stage_needs_a_layer(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 3, but .* 2 layers: set it"):
        build_stage(folder, 0, 3)
