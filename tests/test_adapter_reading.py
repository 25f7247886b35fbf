"""Adapters of a file get into the form of slots, whatever its numbers and the order of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aioinfer.config import LoraConfig
from aioinfer.errors import ConfigError
from aioinfer.features.adapters import checkpoint
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.reading import AdapterReader, PackedAdapter
from aioinfer.features.adapters.sections import AdapterFiles
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from tests.adapter_files import digest_adapter

RANK, IN, OUT = 4, 24, 64
MODULES = ("gate_proj", "up_proj")
HALVES = torch.arange(OUT)
#: Of the rows of two modules, half of each of them on a rank: none, runs of both, and by no rule.
ORDERS = {
    "none": None,
    "runs": HALVES.view(2, -1, 8).transpose(0, 1).flatten(),
    "turns": HALVES.view(2, -1).t().flatten(),
    "backwards": HALVES.view(-1, 8).flip(0).flatten(),
    "random": torch.randperm(OUT, generator=torch.Generator().manual_seed(1)),
}


def write(folder: Path, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Saves a random adapter of two modules in the same order of matrices as of any other seed."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module in MODULES:
        name = f"base_model.model.model.layers.0.mlp.{module}."
        for side, shape in (("A", (RANK, IN)), ("B", (OUT, RANK))):
            tensors[f"{name}lora_{side}.weight"] = torch.randn(shape, generator=generator).to(dtype)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = torch.ones(3, 5, dtype=dtype)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "alpha_pattern": {"up_proj": RANK}}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return tensors


def slots_of(dtype: torch.dtype, order: str = "none") -> AdapterSlots:
    """Slots of the second of two ranks."""
    slots = AdapterSlots(
        LoraConfig(max_adapters=1, max_rank=RANK + 2),
        Backend(torch.device("cpu"), dtype, ParallelGroup(0, 1)),
    )
    rows = Shard.of_rank(OUT, 1, 2)
    product = slots.extend(
        [Source(f"model.layers.0.mlp.{module}", rows, scale=0.7) for module in MODULES],
        Shard.whole(IN),
    )
    product.row_order = ORDERS[order]
    if order == "random":
        product.input_order = torch.randperm(IN, generator=torch.Generator().manual_seed(2))
    return slots


def expected(slots: AdapterSlots, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A and B of the slot, matrix by matrix."""
    (product,), dtype = slots.products, slots.backend.dtype
    down, up = torch.zeros(product.width, IN), torch.zeros(OUT, product.width, dtype=dtype)
    for number, module in enumerate(MODULES):
        name = f"base_model.model.model.layers.0.mlp.{module}.lora_"
        ranks = slice(number * RANK, (number + 1) * RANK)
        down[ranks] = tensors[f"{name}A.weight"]
        own = tensors[f"{name}B.weight"][OUT // 2 :]
        if own.dtype != dtype:
            own = own.float()
        scale = (3 / RANK if number == 0 else 1.0) * 0.7
        up[number * OUT // 2 : (number + 1) * OUT // 2, ranks] = own * scale
    if product.row_order is not None:
        up = up[product.row_order]
    if product.input_order is not None:
        down = down[:, product.input_order]
    return [down.to(dtype), up]


def read(reader: AdapterReader, folder: Path, packed: PackedAdapter) -> None:
    reader.read(AdapterFiles(str(folder), digest_adapter(folder)[1]), packed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("run_bytes", [1, 600, checkpoint._RUN_BYTES])
def test_matrices_are_scaled_and_rounded_once(
    order: str, run_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in memory of another adapter, of the same form and of another one."""
    monkeypatch.setattr(checkpoint, "_RUN_BYTES", run_bytes)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    given = {}
    for number, dtype in enumerate((*dtypes, torch.bfloat16)):
        given[tmp_path / str(number)] = write(tmp_path / str(number), dtype, number)
    for dtype in (torch.bfloat16, torch.float32):
        slots = slots_of(dtype, order)
        slots.allocate(1, 1)
        reader = AdapterReader(slots)
        # not at the beginning of its storage
        packed = PackedAdapter(torch.zeros(2, slots.slot_numbers, dtype=dtype)[1])
        for folder, tensors in reversed(given.items()):
            read(reader, folder, packed)
            slots.enter(0, packed.memory, packed.rank)
            (product,) = slots.products
            found = product._down[0], product._up[:, : product.width]
            for ours, theirs in zip(found, expected(slots, tensors), strict=True):
                assert torch.equal(ours, theirs)
            assert packed.rank == RANK


def test_numbers_that_are_not_finite_are_refused_by_all_ranks(tmp_path: Path) -> None:
    """Whichever rank has them; and finite ones are not that a scale makes infinite."""
    folder, slots = tmp_path / "one", slots_of(torch.float16)
    reader, packed = AdapterReader(slots), PackedAdapter(torch.zeros(slots.slot_numbers).half())
    tensors = write(folder, torch.float32)
    gate, up = (f"base_model.model.model.layers.0.mlp.{module}.lora_B.weight" for module in MODULES)
    for name, value, is_refused in (
        (gate, torch.nan, True), (up, torch.inf, True), (up, -7e4, True), (gate, 7e4, False),
    ):  # fmt: skip
        changed = tensors[name].clone()
        changed[0, 0] = value  # of the first rank
        save_file({**tensors, name: changed}, folder / "adapter_model.safetensors")
        if is_refused:
            with pytest.raises(ValueError, match=r"one: model.*_proj has numbers that are not fi"):
                read(reader, folder, packed)
        else:
            read(reader, folder, packed)


def test_files_that_have_changed_or_end_are_refused(tmp_path: Path) -> None:
    folder, slots = tmp_path / "one", slots_of(torch.float32)
    reader, packed = AdapterReader(slots), PackedAdapter(torch.zeros(slots.slot_numbers))
    tensors, file = write(folder, torch.float32), folder / "adapter_model.safetensors"
    whole, sample = digest_adapter(folder)
    assert digest_adapter(folder) == (whole, sample)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, file)
        if "base_layer" in name:  # of the model, and not read
            assert digest_adapter(folder) == (whole, sample)
            continue
        assert {*digest_adapter(folder)}.isdisjoint((whole, sample))
        with pytest.raises(ValueError, match="has changed since"):
            reader.read(AdapterFiles(str(folder), sample), packed)
    save_file(tensors, file)
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(ConfigError, match="cannot be read: it ends too early"):
        reader.read(AdapterFiles(str(folder), sample), packed)
    length = 8 + int.from_bytes(content[:8], "little")
    header, shape = content[8:length], b"[4,24]"
    broken = header.replace(shape, b'["x",24]'), header.replace(shape, b"[4,25]")
    for header in (b"[]", b'{"a":{"dtype":"F32"}}', *broken):
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[length:])
        with pytest.raises(ConfigError, match=r"cannot be read|for the shape \(4, 25\)"):
            digest_adapter(folder)
    file.write_bytes((2**40).to_bytes(8, "little") + content[8:])
    with pytest.raises(ConfigError, match="its header has 1099511627776 bytes"):
        digest_adapter(folder)
