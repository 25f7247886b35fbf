"""The head of a model that predicts further tokens (`models.mtp`) as its drafter: it reads the
model's hidden states, and shares its embedding, its head and its attention plans. The model loads
the head's weights and gives it its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.step import Step
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.drafters.drafter import Drafter


class MtpDrafter(Drafter):
    """Implements `Drafter` for the head of a model. Further passes apply the one head again.

    Args:
        target: made with its head.
    """

    reads_hidden = True
    weights_bytes = 0

    def __init__(self, target: DecoderModel):
        assert target.mtp is not None
        self._target, self._mtp = target, target.mtp
        self.backend, self.hidden_size = target.backend, target.hidden_size
        self.vocabulary = target.vocabulary

    @property
    def kv_specs(self) -> Sequence[Sequence[KVSpec]]:
        """See `Drafter.kv_specs`. The head's layer is among the model's."""
        return ()

    @property
    def supports_graphs(self) -> bool:
        """See `Drafter.supports_graphs`."""
        return self._target.supports_graphs

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Does nothing: the model is loaded with its head."""

    def bind(
        self, groups: Sequence[KVGroup], kv: Sequence[torch.Tensor], block_size: int, rows: int,
        tokens: int,
    ) -> None:  # fmt: skip
        """Does nothing: the model is bound with its head."""

    def warm_up(self) -> None:
        """Does nothing: the model's parts are of the same kinds."""

    def plan(self, step: Step) -> None:
        """See `Drafter.plan`."""
        self._target.plan(step)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter.combine`: the head takes hidden states behind the last norm."""
        return self._target.normed(hidden)

    def forward(self, hidden: torch.Tensor | None, step: Step) -> torch.Tensor:
        """See `Drafter.forward`."""
        assert hidden is not None
        assert self._target.embedding is not None
        embedded = self._target.embedding(step.inputs.input_ids).hidden
        output = self._mtp(hidden, embedded, step)
        return output if step.sampled is None else output.index_select(0, step.sampled.last)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter.logits`. The hidden states are normed already."""
        assert self._target.head is not None
        return self._target.head(hidden, None)
