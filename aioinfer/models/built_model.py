"""A model that a `LayerMaker` has made: its weights, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.shards import NamedShards
from aioinfer.models.bound_layers import BoundLayers
from aioinfer.models.loader import load_weights
from aioinfer.models.weight_update import LayerForm


class BuiltModel(BoundLayers):
    """Layers of one rank with what stands before and behind them.

    Attributes:
        weights_bytes: see `CausalLM.weights_bytes`.
        forms: of its layers with parameters, once they are loaded; for `WeightUpdate`.
    """

    _make: LayerMaker
    weights_bytes: int
    forms: Sequence[LayerForm] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is quantized."""
        return self._make.quantization is not None

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor, before
        `finalize`."""
        return self._make.weight_shards()

    def finalize(self) -> None:
        """Prepares the loaded weights for the device."""
        self.weights_bytes += self._make.finalize()

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """See `CausalLM.load`."""
        quantization = self._make.quantization
        zero = () if quantization is None else quantization.zero
        shards = list(self.weight_shards())
        self.forms = LayerForm.of_layers(self._make.loadable, folder, load_format)
        load_weights(shards, folder, load_format, seed, on_progress, self.is_unused, zero)
        del shards  # loaded tensors are freed layer by layer
        self.finalize()

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor that this rank does not need."""
        raise NotImplementedError
