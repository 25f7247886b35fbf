"""Random adapters as peft saves them, written without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from aioinfer.features.adapters.checkpoint import open_adapter
from aioinfer.features.adapters.layers.parts import AdapterWeights, PieceCopies
from aioinfer.features.adapters.layers.slots import AdapterSlots


def write_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], *, rank: int, deviation: float = 0.1
) -> dict[str, torch.Tensor]:
    """Saves a random adapter into `folder`, which is made if it is not there.

    Args:
        folder: of the adapter.
        modules: (out, in) of the checkpoint's modules that it changes, in which an embedding's
            inputs are the token ids.
        rank: of all of them; its product is scaled by 2.
        deviation: of what it adds, for inputs of a deviation of 1, per rank and half.

    Returns:
        what is added to each module's weight, [out, in] or of an embedding [in, out].
    """
    generator, tensors, added = torch.Generator().manual_seed(rank), {}, {}
    for module, (out, width) in modules.items():
        down = torch.randn(rank, width, generator=generator) / width**0.5
        up = torch.randn(out, rank, generator=generator) * deviation
        name = f"base_model.model.{module}.lora_"
        if module.endswith("embed_tokens"):
            down *= width**0.5  # a token has one input
            tensors |= {f"{name}embedding_A": down, f"{name}embedding_B": up}
            added[module] = 2 * (up @ down).t()
            continue
        tensors |= {f"{name}A.weight": down, f"{name}B.weight": up}
        added[module] = 2 * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return added


def pack_adapter(slots: AdapterSlots, weights: Mapping[str, AdapterWeights]) -> torch.Tensor:
    """Returns an adapter in the form of a slot."""
    packed = torch.zeros(slots.slot_numbers, dtype=slots.backend.dtype)
    copies = PieceCopies(slots.pieces(weights, packed))
    copies.run([p.target for p in copies.pieces], [p.source for p in copies.pieces])
    return packed


def digest_adapter(folder: Path) -> tuple[str, str]:
    """Returns the digests of an adapter's files; see `OpenAdapter.digests`."""
    with open_adapter(folder) as adapter:
        return adapter.digests(adapter.layout().runs)
