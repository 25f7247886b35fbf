"""A draft model: a smaller model of the target's vocabulary (Leviathan et al. 2023; Chen et al.
2023). It reads nothing of the target. Its text is the target's without the second token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.step import Step
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.drafters.drafter import Drafter


class DraftModel(Drafter):
    """A whole model as a drafter.

    Args:
        model: of the same ranks as the target.
        vocab_size: of the target's logits.
    """

    keeps_first = True

    def __init__(self, model: CausalLM, vocab_size: int):
        self._model = model
        self.backend, self.hidden_size = model.backend, model.hidden_size
        self.vocabulary = model.vocabulary
        self.weights_bytes = model.weights_bytes
        self._has_fewer_ids = model.vocabulary.vocab_size < vocab_size

    @property
    def kv_specs(self) -> Sequence[Sequence[KVSpec]]:
        """See `Drafter.kv_specs`."""
        return self._model.kv_specs

    @property
    def supports_graphs(self) -> bool:
        """See `Drafter.supports_graphs`."""
        return self._model.supports_graphs

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """See `Drafter.load`."""
        self._model.load(folder, load_format, seed, on_progress)
        self.weights_bytes = self._model.weights_bytes

    def bind(
        self, groups: Sequence[KVGroup], kv: Sequence[torch.Tensor], block_size: int, rows: int,
        tokens: int,
    ) -> None:  # fmt: skip
        """See `Drafter.bind`."""
        self._model.bind(groups, kv, block_size, rows, tokens)

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        self._model.warm_up()

    def plan(self, step: Step) -> None:
        """See `Drafter.plan`."""
        self._model.plan(step)

    def forward(self, hidden: torch.Tensor | None, step: Step) -> torch.Tensor:
        """See `Drafter.forward`."""
        model = self._model
        if self._has_fewer_ids:  # the target's vocabulary may be padded further
            step.inputs.input_ids.clamp_(max=model.vocabulary.vocab_size - 1)
        return model.finish(step, model.begin(step))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter.logits`."""
        return self._model.logits(hidden)
