"""A model that a `LayerMaker` has made: its weights, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.offload import OffloadedLayers
from aioinfer.layers.part_maker import Loadable
from aioinfer.layers.shards import NamedShards
from aioinfer.models.bound_layers import BoundLayers
from aioinfer.models.loader import load_weights
from aioinfer.models.weight_update import LayerForm


class BuiltModel(BoundLayers):
    """Layers of one rank with what stands before and behind them.

    Attributes:
        weights_bytes: see `CausalLM.weights_bytes`.
        forms: of its layers with parameters, once they are loaded; for `WeightUpdate`.
        offloaded: the layers whose weights are on the host; None without any.
    """

    _make: LayerMaker
    weights_bytes: int
    forms: Sequence[LayerForm] = ()
    offloaded: OffloadedLayers | None = None

    @property
    def is_stored_quantized(self) -> bool:
        """See `LoadedModel.is_stored_quantized`."""
        quantization = self._make.quantization
        return quantization is not None and not quantization.is_online

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
        self.forms = LayerForm.of_layers(self._make.loadable, folder, load_format)
        if self.offloaded is not None:
            self._load_apart(self.offloaded, folder, load_format, seed, on_progress, zero)
            return
        shards = list(self.weight_shards())
        load_weights(shards, folder, load_format, seed, on_progress, self.is_unused, zero)
        del shards  # loaded tensors are freed layer by layer
        self.finalize()

    def _load_apart(
        self, offloaded: OffloadedLayers, folder: Path, load_format: str, seed: int,
        on_progress: Callable[[int, int], None], zero: Sequence[str],
    ) -> None:  # fmt: skip
        """Loads the offloaded layers one by one, and then all others; arguments as for `load`, and
        `load_weights`."""
        make, total, done = self._make, self.weights_bytes, 0
        names = {name for form in self.forms for name in form.names}
        groups = offloaded.groups
        for number, made in enumerate([*groups, make.without(groups)]):
            if is_offloaded := number < len(groups):
                offloaded.begin(made)
            shards = [each for layer in made.layers for each in layer.weight_shards()]
            load_weights(
                shards, folder, load_format, seed + number,
                lambda part, _, at=done: on_progress(at + part, total),  # type: ignore[misc]
                lambda name: name in names or self.is_unused(name), zero,
            )  # fmt: skip
            done += sum(shard.destination.nbytes for _, shard in shards)
            del shards
            self.weights_bytes += make.finalize(made)
            if is_offloaded:
                offloaded.keep(made)
        offloaded.settle(self.backend.device)
        self.weights_bytes += offloaded.slot_bytes - offloaded.nbytes

    def rewriting(self, layer: Loadable) -> AbstractContextManager[None]:
        """See `OffloadedLayers.rewriting`."""
        return nullcontext() if self.offloaded is None else self.offloaded.rewriting(layer)

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor that this rank does not need."""
        raise NotImplementedError
