"""Weights of a model that serves are replaced: by those of a checkpoint, and tensor by tensor. The
model then computes what a model computes that was loaded with them; an update that does not go with
the model changes nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError, WorkerCallError
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.tensor_memory import find_tensors
from aioinfer.models.built_model import BuiltModel
from aioinfer.models.weight_update import WeightUpdate
from aioinfer.worker.tensor_handles import open_tensor, read_handle
from tests.paged_model import PagedModel, load_model
from tests.scaled_models import layouts, write
from tests.test_rank_memory import memory_of_host
from tests.tiny_models import FAMILIES, tiny_model

PROMPT = [7, 3, 250, 41, 9, 90]


def load(
    folder: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32
) -> BuiltModel:
    with torch.inference_mode():
        model = load_model(folder, ParallelGroup.single(), dtype, quantization=quantization)
    assert isinstance(model, BuiltModel)
    return model


def logits_of(model: BuiltModel) -> torch.Tensor:
    paged = PagedModel(model, 4)  # type: ignore[arg-type]
    return torch.cat([paged.step({0: PROMPT})[0], paged.step({0: [11]})[0]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    made: dict[tuple[str, int], Path] = {}

    def make(family: str, seed: int) -> Path:
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{seed}")
            name, _, tied = family.partition("-")
            fields = {"tie_word_embeddings": bool(tied)}
            made[family, seed] = tiny_model(name, folder, seed=seed, **fields)
        return made[family, seed]

    return make


#: Families that together have all kinds of layers; the others are extended.
KINDS = (
    "bamba", "deepseek_v3", "falcon", "gemma3n_text", "gpt_oss", "kimi_linear", "qwen3",
    "qwen3-tied",
)  # fmt: skip


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits of other weights differ by 1 and more; those of the same weights at other addresses
    may be sums in another order."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(
            pytest.param(family, "auto", marks=() if family in KINDS else pytest.mark.extended)
            for family in (*FAMILIES, "qwen3-tied")
        ),
        ("qwen3", "fp8"),
        ("deepseek_v3", "int8"),
    ],
)
def test_a_model_computes_with_the_weights_of_another_checkpoint(
    checkpoint: Callable[[str, int], Path], family: str, quantization: str
) -> None:
    """Also if it quantizes them while it loads them."""
    first, second = checkpoint(family, 0), checkpoint(family, 1)
    model, expected = load(first, quantization), logits_of(load(second, quantization))
    before = logits_of(model)
    with torch.inference_mode():
        WeightUpdate(model).release()  # as sleep at level 2
        WeightUpdate(model).read(second)
    assert_same(logits_of(model), expected)
    with torch.inference_mode():
        update = WeightUpdate(model)
        tensors = [each for file in first.glob("*.safetensors") for each in load_file(file).items()]
        for number in range(0, len(tensors), 3):
            update.take(tensors[number : number + 3])
        update.finish()
    assert_same(logits_of(model), before)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@torch.inference_mode()
def test_sleep_at_level_2_takes_no_memory_and_keeps_no_weights(
    checkpoint: Callable[[str, int], Path], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of float8 weights that no kernel reads: they are kept in bfloat16."""
    model, other = (load(checkpoint("qwen3", n), quantization, torch.bfloat16) for n in (0, 1))
    memory = memory_of_host(monkeypatch)
    memory.take_weights([model])
    memory.begin_service()
    addresses = [each.data_ptr() for each in weights_of(model)]
    memory.sleep(WeightUpdate(model).release())
    assert [each.data_ptr() for each in weights_of(model)] == addresses
    begin = min(each.data_ptr() for each in find_tensors([model]) if each.numel())
    kept = {begin + place.start for place in memory._kept}
    assert kept.isdisjoint(each.data_ptr() for each in weights_of(model) if each.ndim > 1)
    memory.note_update()
    memory.wake_up(["weights"])
    WeightUpdate(model).read(checkpoint("qwen3", 1))
    assert all(map(torch.equal, weights_of(model), weights_of(other)))
    assert [each.data_ptr() for each in weights_of(model)] == addresses


def weights_of(model: BuiltModel) -> list[torch.Tensor]:
    return [each for each in find_tensors(form.layer for form in model.forms) if each.numel()]


def test_a_quantized_checkpoint_is_not_loaded_again(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path)
    write(folder, layouts((16, 16))["float channel"])
    with pytest.raises(ConfigError, match="weights of a quantized checkpoint"):
        WeightUpdate(load(folder))


def test_a_wrong_tensor_changes_nothing(
    checkpoint: Callable[[str, int], Path], tmp_path: Path
) -> None:
    model, name = load(checkpoint("qwen3", 0)), "model.layers.0.mlp.down_proj.weight"
    before = logits_of(model)
    tensors = load_file(checkpoint("qwen3", 1) / "model.safetensors")
    good = [(each, tensor) for each, tensor in tensors.items() if each != name]
    wrong = {
        "has the shape": (name, tensors[name][:-1]),
        "no tensor model.layers.9": ("model.layers.9.mlp.down_proj.weight", tensors[name]),
        "of the type torch.int32": (name, tensors[name].int()),
    }
    with torch.inference_mode():
        for message, tensor in wrong.items():
            with pytest.raises(ConfigError, match=message):
                WeightUpdate(model).take([*good, tensor])
        for message, changed in {
            "has the shape": tensors | {name: tensors[name][:-1].contiguous()},
            "1 missing": dict(good),
            "1 unknown": tensors | {"model.layers.9.mlp.down_proj.weight": tensors[name].clone()},
            "of the type I32": tensors | {name: tensors[name].int()},
        }.items():
            save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
            with pytest.raises(ConfigError, match=message):
                WeightUpdate(model).read(tmp_path)
    assert_same(logits_of(model), before)


def test_a_layer_that_lacks_tensors_keeps_its_weights(
    checkpoint: Callable[[str, int], Path],
) -> None:
    model = load(checkpoint("qwen3", 0))
    before = logits_of(model)
    tensors = load_file(checkpoint("qwen3", 1) / "model.safetensors")
    gate = "model.layers.1.mlp.gate_proj.weight"
    with torch.inference_mode():
        update = WeightUpdate(model)
        update.take([(gate, tensors[gate])])
        with pytest.raises(ConfigError, match=r"lacks 1 tensors of layers: .*up_proj"):
            update.finish()
    assert_same(logits_of(model), before)


def handle(**changed: Any) -> dict[str, Any]:
    field = base64.b64encode(bytes(64)).decode()
    values = {
        "stride": [8, 1], "offset": 16, "storage_bytes": 160, "storage_offset": 512,
        "counter_offset": 0, "needs_event": True, "storage": field, "counter": field,
        "event": field,
    }  # fmt: skip
    return values | changed


def test_a_tensor_lies_within_its_storage() -> None:
    assert read_handle(handle(), torch.float32, [3, 8])["storage"] == bytes(64)
    for changed in (
        {"offset": 17}, {"stride": [9, 1]}, {"storage_bytes": 159}, {"stride": [1]},
        {"offset": -1}, {"storage": "%"}, {"stride": [8, -1]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"storage|shape|base64|[Ii]nvalid"):
            read_handle(handle(**changed), torch.float32, [3, 8])
    with pytest.raises(KeyError):
        read_handle({}, torch.float32, [3, 8])


def test_workers_on_a_cpu_open_none() -> None:
    with pytest.raises(WorkerCallError, match="need workers on that GPU"):
        open_tensor({"GPU-1": handle()}, torch.float32, [3, 8], torch.device("cpu"))
