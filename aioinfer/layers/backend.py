"""Resources that the layers of one rank compute with: device, dtype, ranks, and kernels where there
are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from aioinfer.ipc.expert_placement import ExpertPlacement
from aioinfer.layers.kernel_choices import KernelChoices
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.state_rows import SavedInputs

if TYPE_CHECKING:
    from aioinfer.kernels.all_reduce import AllReduce
    from aioinfer.layers.extension import Extension


class Scratch:
    """Memory that the layers of a rank use one after the other, as large as the largest of them
    needs; none until it is asked for."""

    def __init__(self) -> None:
        self._size = 0
        self._memory: torch.Tensor | None = None

    def reserve(self, size: int) -> None:
        """Makes room for `size` numbers; called before any `view`."""
        self._size = max(self._size, size)

    def view(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns [rows, columns], always at the same address, for reserved sizes."""
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=dtype, device=device)
        return self._memory[: rows * columns].view(rows, columns)


class Transfers(Protocol):
    """Copies from memory of the host to a device, beside its kernels, which the worker makes."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory of the host for copies, uint8 [nbytes]. Raises `RuntimeError`."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begins a copy that waits for all that has been launched so far; returns its end."""

    def wait(self, end: Any) -> None:
        """Has all that is launched from now on wait for the end of a copy."""


class Offload(NamedTuple):
    """What a rank is to offload.

    Attributes:
        nbytes: of weights, at least.
        transfers: copies.
    """

    nbytes: int
    transfers: Transfers


@dataclass(slots=True)
class Backend:
    """The resources of a rank's layers, one object for all of them.

    Attributes:
        device, dtype: of weights and arithmetic.
        state_dtype: the name of the dtype of matrices that layers keep as a state.
        group: the tensor-parallel ranks that share each layer.
        expert_parallel: whether each of these ranks has some of the experts, whole, instead of some
            channels of every expert.
        expert_group: the ranks of all engines, where these have the experts instead, and tokens of
            their own, which they send to each other (data-parallel attention).
        expert_placement: which experts each rank has in both cases.
        has_kernels: whether the layers use the Triton kernels; plain torch otherwise.
        pdl: whether kernels are launched as programmatic dependents (Hopper and later).
        is_hopper: whether the kernels made for Hopper alone can run.
        saved_rows: the number of slots, and of lookahead rows of each of which layers with a state
            keep the inputs; (0, 0) where no row looks ahead. The worker sets it before layers are
            bound.
        cascade: whether attention reads the keys of a prefix that decodes share once for all.
        extension: what a feature adds to the layers; None for nothing.
        offload: what a model that is made is to have on the host; None for nothing.
        wants_mtp: whether the model is to have its head that predicts further tokens.
        wants_embedding: whether the last stage of a pipeline has the embedding, too, since a
            drafter reads it.
        all_reduce: the sum over the ranks in symmetric memory; None for one rank, or without
            kernels. The worker sets it when it knows how many tokens a step may have.
        stage, num_stages: which part of the layers the rank has, and of how many.
        scratch: memory that quantized weights are dequantized into for products of many rows.
        choices: which kernels compute the products, as far as it was measured.
        omits_equal_layers: whether a decoder computes only layers whose kernels no layer before
            them launches: set while kernels are compiled.
    """

    device: torch.device
    dtype: torch.dtype
    group: ParallelGroup
    state_dtype: str = "float32"
    has_kernels: bool = False
    expert_parallel: bool = False
    expert_group: ParallelGroup | None = None
    expert_placement: ExpertPlacement = field(default_factory=ExpertPlacement)
    pdl: bool = False
    is_hopper: bool = False
    saved_rows: tuple[int, int] = (0, 0)
    cascade: bool = False
    extension: Extension | None = None
    offload: Offload | None = None
    wants_mtp: bool = False
    wants_embedding: bool = False
    all_reduce: AllReduce | None = None
    stage: int = 0
    num_stages: int = 1
    scratch: Scratch = field(default_factory=Scratch)
    choices: KernelChoices = field(default_factory=KernelChoices)
    omits_equal_layers: bool = False

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank has the last layers, the last norm and the head."""
        return self.stage == self.num_stages - 1

    @property
    def computes_alone(self) -> bool:
        """Whether no kernel of the layers waits for another rank."""
        return self.group.size == 1 and self.num_stages == 1 and self.expert_group is None

    @contextmanager
    def omitting_equal_layers(self) -> Iterator[None]:
        """Context in which `omits_equal_layers` is set."""
        self.omits_equal_layers = True
        try:
            yield
        finally:
            self.omits_equal_layers = False

    def saved_inputs(self, sizes: Sequence[int]) -> SavedInputs:
        """Returns memory for the inputs of lookahead rows, of `sizes` channels each."""
        return SavedInputs(*self.saved_rows, sizes, self.dtype, self.device)

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        group: ParallelGroup,
        *,
        expert_parallel: bool = False,
        expert_group: ParallelGroup | None = None,
        expert_placement: ExpertPlacement | None = None,
        stage: int = 0,
        num_stages: int = 1,
    ) -> Backend:
        """Returns the backend of a device: kernels on GPUs, dependent launches from Hopper on."""
        backend = cls(device, dtype, group, expert_parallel=expert_parallel)
        backend.expert_group = expert_group
        if expert_placement is not None:
            backend.expert_placement = expert_placement
        backend.stage, backend.num_stages = stage, num_stages
        if device.type != "cpu":
            backend.has_kernels = True
            major, _ = torch.cuda.get_device_capability(device)
            backend.pdl, backend.is_hopper = major >= 9, major == 9
        return backend
