"""What a feature adds to the layers of a rank beside their weights: further terms of products, for
those tokens of a step that have them.

`Backend.extension` has it while a model is made; the model's parts ask it for what belongs to each
weight, and use that while `Extension.is_active`. A step in which it is not computes what it would
without. `worker.features.WorkerFeature.extend_layers` makes it. What it knows of tokens, a tensor
with an entry for each, is handed on by the layers as it is: `Terms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step

#: Which terms each of N tokens has: an integer tensor [N], negative for none.
Terms = torch.Tensor
#: Selects rows [heads, size, columns] of a matrix [out, columns].
RowPart = Callable[[torch.Tensor], torch.Tensor]


class Extending(ABC):
    """Base class of what an extension consists of: weights refer to it, and it is no part of them
    (`layers.tensor_memory`)."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether a token of the step may have a term."""


class ProductExtension(Extending):
    """What is added to the product of one weight with a step's tokens.

    Attributes:
        row_order: int64 [out], the row in checkpoint order at each place; None for the same order.
        input_order: int64 [in], the input at each place; None for the same order.
    """

    row_order: torch.Tensor | None = None
    input_order: torch.Tensor | None = None

    @abstractmethod
    def may_fuse(self, x: torch.Tensor) -> bool:
        """Whether a kernel may add it to the product of x [T, in] in its own launch."""

    @abstractmethod
    def operand(self, x: torch.Tensor) -> Any:
        """Returns what a kernel takes that adds it to the product of x [T, in] in its own launch,
        if `may_fuse`. A kernel that norms x of one token adds it for the norm."""

    @abstractmethod
    def begin(self, x: torch.Tensor) -> None:
        """Begins to compute what `add` adds for x [T, in], beside the weight's product with x."""

    @abstractmethod
    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds it for the tokens x [T, in] to y [T, out], after `begin`."""


class RowExtension(Extending):
    """What is added to a product of rows that are not a step's tokens, in plain torch, which CUDA
    graphs may capture."""

    @abstractmethod
    def terms_of(self, step: Step) -> Terms | None:
        """See `Extension.terms_of`."""

    @abstractmethod
    def add_rows(self, x: torch.Tensor, y: torch.Tensor, terms: Terms) -> None:
        """Adds it for the rows x [N, in] to y [N, out]."""

    @abstractmethod
    def add_looked_up(self, numbers: torch.Tensor, y: torch.Tensor, terms: Terms) -> None:
        """Adds it to y [N, out] for inputs that are one at one channel each, and else zero.

        Args:
            numbers: integers [N], these channels, among all that the ranks have together; a rank
                adds nothing for those of others.
        """

    @abstractmethod
    def add_from_outputs(
        self, x: torch.Tensor, y: torch.Tensor, terms: Terms, part: RowPart
    ) -> None:
        """Adds the product of the transposed matrix, of x [N, heads, size] to y [N, heads, in]."""

    @abstractmethod
    def add_by_heads(self, x: torch.Tensor, y: torch.Tensor, terms: Terms, part: RowPart) -> None:
        """Adds the product of x [N, heads, in] to y [N, heads, size]."""


class ExpertExtension(Extending):
    """What is added to the two products of a layer's experts."""

    @abstractmethod
    def terms_of(self, step: Step, rows: int) -> Terms | None:
        """Returns the terms of each row of a layer, which has all tokens of a step or the sampled
        ones; None where no token may have one."""

    @abstractmethod
    def add(
        self, place: int, x: torch.Tensor, y: torch.Tensor, terms: Terms, *, is_first: bool
    ) -> None:
        """Adds it for the rows x [R, in] of one expert to y [R, out], in plain torch; `place`: of
        the expert, among the rank's."""

    @abstractmethod
    def sort(self, terms: Terms, routed: Any) -> Any:
        """Returns the pairs of tokens with terms and experts as `add_to_pairs` takes them."""

    @abstractmethod
    def add_to_pairs(self, x: torch.Tensor, y: torch.Tensor, pairs: Any, *, is_first: bool) -> None:
        """Adds it for all pairs, by kernels."""


class Extension(Extending):
    """All that a feature adds to the layers of one rank. As a context, a block in which tokens may
    have terms.

    Attributes:
        shortage: what takes the memory of `allocate`, and which setting takes less.
    """

    shortage: ClassVar[tuple[str, str]]
    _is_active = False

    @property
    def is_active(self) -> bool:
        """See `Extending.is_active`; set for each step."""
        return self._is_active

    @is_active.setter
    def is_active(self, value: bool) -> None:
        self._is_active = value

    def __enter__(self) -> None:
        self._is_active = True

    def __exit__(self, *error: object) -> None:
        self._is_active = False

    # ---------------------------------------------------------------- while a model is made

    @abstractmethod
    def extend(self, sources: Sequence[Source], columns: Shard) -> ProductExtension:
        """Returns what is added to the product of a weight."""

    @abstractmethod
    def extend_rows(self, sources: Sequence[Source], columns: Shard) -> RowExtension:
        """Returns what is added to a product whose rows are not the step's tokens."""

    @abstractmethod
    def extend_experts(
        self, stacks: tuple[str, str], here: Sequence[Sequence[Source]], placed: Any,
        *, takes_stacked: bool, in_turns: bool = False, channels: Shard | None = None,
    ) -> ExpertExtension | None:  # fmt: skip
        """Returns what is added to this rank's experts; None for nothing. Raises `ConfigError`.

        Args:
            stacks: the modules of all experts' weights: gates and ups, and downs.
            here: the rows of each expert.
            placed: a `PlacedExperts`.
            takes_stacked: whether the kernels compute the mixture.
            in_turns: the checkpoint has the rows of gates and ups in turns.
            channels: of each expert, if not those of `placed`.
        """

    @abstractmethod
    def extend_ends(self, hidden_size: int, embedding: Any, head: Any) -> None:
        """Extends the `Embedding` and the `LMHead` of a model, as far as the rank has them (else
        they are None)."""

    @property
    @abstractmethod
    def is_used(self) -> bool:
        """Whether the model that was made has asked for anything."""

    @abstractmethod
    def allocate(self, tokens: int, requests: int) -> None:
        """Makes its memory, for steps of up to `tokens` tokens and so many running requests."""

    @abstractmethod
    def warm_up(self) -> None:
        """Launches its kernels that are in no step, to compile them."""

    # ---------------------------------------------------------------- steps

    @abstractmethod
    def plan(self, step: Step) -> None:
        """Finds the terms of a step's tokens, before its products; on a GPU this may be captured in
        a CUDA graph."""

    @abstractmethod
    def terms_of(self, step: Step) -> Terms | None:
        """Returns the terms of a step's tokens; None where none may have one."""

    @abstractmethod
    def terms_at(self, tokens: torch.Tensor | None) -> Terms | None:
        """Returns the terms of tokens of the planned step, integers [N], by default of the sampled
        ones; None where no token may have one."""

    @abstractmethod
    def expecting(self, tokens: int) -> AbstractContextManager[None]:
        """Context in which products read the terms of all tokens of a step of up to so many, which
        `plan` finds before they are computed: for a CUDA graph of layers alone."""
