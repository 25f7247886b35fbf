"""Multi-token prediction (DeepSeek-AI 2024, section 2.2): a layer behind the model's last one that
predicts the token after the next.

For position i it takes the model's hidden state of i, behind the model's last norm, and the
embedding of token i + 1; both are normed and projected together to the width of the stream. A layer
of the family follows, with a KV cache of its own, and a norm. Embedding and head are the model's.
Its output takes the place of the model's hidden state where it is applied again for a further
token, as published servers do (vLLM, SGLang).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step
from aioinfer.models.loader import locate_tensors

_PROJECTION = re.compile(
    r"(mtp\.fc|model\.layers\.\d+\.eh_proj|model\.mtp_layers\.0\.input_proj)\."
)


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The checkpoint's modules beside the layer.

    Attributes:
        embedding_norm, hidden_norm: before the projection.
        projection: of both together.
        norm: behind the layer.
        is_hidden_first: whether the projection takes the hidden state before the embedding.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    is_hidden_first: bool = False

    @classmethod
    def of_layer(cls, number: int) -> MtpNames:
        """Returns the names of DeepSeek-V3 and GLM-4.5, whose heads are layer `number`."""
        prefix = f"model.layers.{number}"
        return cls(
            f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.eh_proj", f"{prefix}.shared_head.norm"
        )


class MtpHead:
    """The layer and what is before and behind it.

    Args:
        names: of its modules.
        layer: returns the layer.
        make: makes the rest.
        unit_offset: whether norms store their weights less one.

    Attributes:
        layer: the layer.
    """

    def __init__(
        self,
        names: MtpNames,
        layer: Callable[[], Layer],
        make: LayerMaker,
        *,
        unit_offset: bool = False,
    ):
        size = make.hidden_size
        self._embedding_norm = make.norm(names.embedding_norm, unit_offset=unit_offset)
        self._hidden_norm = make.norm(names.hidden_norm, unit_offset=unit_offset)
        source = Source(names.projection, Shard.whole(size))
        self._projection = make.column([source], 2 * size)
        self.layer = layer()
        self._norm = make.norm(names.norm, unit_offset=unit_offset)
        self._is_hidden_first, self._backend = names.is_hidden_first, make.backend

    def __call__(self, hidden: torch.Tensor, embedded: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, hidden_size] for the tokens of a step, which the head and the next
        application take.

        Args:
            hidden: [T, hidden_size], the model's hidden states behind its last norm, or the
                output of the application before.
            embedded: [T, hidden_size], the embedding of the token after each.
            step: with the positions of `hidden`.
        """
        both = self._embedding_norm(embedded), self._hidden_norm(hidden)
        joined = torch.cat(both[::-1] if self._is_hidden_first else both, dim=1)
        stream = ResidualStream(self._projection(joined), self._backend)
        self.layer(stream, step)
        return self._norm(stream.hidden)


def find_projection(folder: Path) -> str | None:
    """Returns the module that projects the inputs of the head of the checkpoint in a folder; None
    for a checkpoint without a head. Raises `ConfigError` if its files cannot be read."""
    names = (name for name in locate_tensors(folder) if _PROJECTION.match(name))
    return next((name.rpartition(".")[0] for name in names), None)
