"""Layers whose weights are in memory of the host, and on the device only while they are used
(`model.offload_gb`).

The large tensors of such layers have two slots on the device, each as large as the largest layer,
which the layers take in turn: kernels and CUDA graphs find a layer's weights at one address. A pass
through the layers begins to copy the first two; when a layer has been launched, the copy of the
layer after the next begins, into the slot that becomes free. Copies are in an order of their own
beside the kernels (`Transfers`): one waits for what was launched before it, and its layer waits for
it. A pass finds nothing in the slots that it relies on, and leaves no copy unused, so that graphs
can hold it, and weights may change in between. (The idea is vLLM's and DeepSpeed's; FlexGen
describes the schedule: Sheng et al. 2023.)

The layers are spread over the model, since the others are computed while a copy goes on. All of
them together may never be on the device: when a layer has been made, its weights get memory that
all of them have in common (`release`), and they are loaded one after the other (`keep`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Transfers
from aioinfer.layers.layer import Layer
from aioinfer.layers.part_maker import Loadable, Made
from aioinfer.layers.tensor_memory import find_tensors, group_by_storage, padded

#: Smaller tensors stay on the device: together they are small, and kernels write to some of them.
MIN_BYTES = 1 << 16
#: With two slots, two offloaded layers would save nothing.
_MIN_LAYERS = 3


class _Piece(NamedTuple):
    """A tensor, or several with common memory.

    Attributes:
        tensors: all that refer to the memory.
        storage: that it is a part of.
        start, nbytes: which part.
    """

    tensors: list[torch.Tensor]
    storage: torch.UntypedStorage
    start: int
    nbytes: int

    def memory(self) -> torch.Tensor:
        """Returns the memory, uint8 [nbytes]."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return whole[self.start : self.start + self.nbytes]

    def move(self, target: torch.Tensor, begin: int) -> _Piece:
        """Has the tensors refer to `target` (uint8 [n]), from byte `begin` on, whatever that
        holds."""
        storage = target.untyped_storage()
        for tensor in self.tensors:
            offset = tensor.storage_offset() + (begin - self.start) // tensor.itemsize
            tensor.set_(storage, offset, tensor.shape, tensor.stride())
        return self._replace(storage=storage, start=begin)


class _Offloaded:
    """A layer.

    Attributes:
        layer: itself.
        made: what it has of parameters.
        made_pieces: where its weights will be loaded, and what that has held unless all of it will
            be loaded.
        host: its weights, once it is loaded.
        pieces: the weights, and where each begins in `host`, until they are in a slot.
    """

    def __init__(self, layer: Layer, made: Made):
        self.layer, self.made = layer, made
        self.made_pieces: list[tuple[_Piece, torch.Tensor | None]] = []
        self.host = torch.empty(0, dtype=torch.uint8)
        self.pieces: list[tuple[_Piece, int]] = []

    def find(self) -> list[_Piece]:
        """Returns the large tensors of what has parameters."""
        addresses = {
            group[0].untyped_storage().data_ptr()
            for group in group_by_storage(find_tensors(self.made.layers))
        }
        pieces: list[_Piece] = []
        for group in group_by_storage(find_tensors([*self.made.layers, self.layer])):
            storage = group[0].untyped_storage()
            if storage.data_ptr() in addresses:
                pieces += self._divided(group, storage)
        return [piece for piece in pieces if piece.nbytes >= MIN_BYTES]

    def _divided(self, group: list[torch.Tensor], storage: torch.UntypedStorage) -> list[_Piece]:
        """Returns tensors with one storage by the pieces that were made, if these are there."""
        there = [
            made for made, _ in self.made_pieces if made.storage.data_ptr() == storage.data_ptr()
        ]
        if not there:
            return [_Piece(group, storage, 0, storage.nbytes())]
        divided = [
            made._replace(
                tensors=[
                    tensor
                    for tensor in group
                    if 0 <= tensor.storage_offset() * tensor.itemsize - made.start < made.nbytes
                ]
            )
            for made in there
        ]
        return [piece for piece in divided if piece.tensors]


def choose_layers(sizes: Sequence[int], nbytes: int) -> list[int]:
    """Returns which of a rank's layers, of `sizes` bytes, are offloaded: the fewest that have
    `nbytes` together, at equal distances, but neither the first nor the last. Raises `ConfigError`
    if that is not enough."""
    inner = range(1, len(sizes) - 1)
    for count in range(_MIN_LAYERS, len(inner) + 1):
        chosen = [inner[(2 * n + 1) * len(inner) // (2 * count)] for n in range(count)]
        if sum(sizes[number] for number in chosen) >= nbytes:
            return chosen
    total = sum(sizes[number] for number in inner) / 2**30
    raise ConfigError(
        f"model.offload_gb = {nbytes / 2**30:g}: without the first and the last layer, which stay "
        f"on the device, a worker's {len(inner)} layers have {total:.2f} GiB"
        + (f"; at least {_MIN_LAYERS} of them are needed" if len(inner) < _MIN_LAYERS else "")
    )


class OffloadedLayers:
    """The offloaded layers of one rank, in their order.

    Attributes:
        groups: what each has of parameters.
        nbytes: of their weights on the host, once they are loaded.
        slot_bytes: of the two slots.
    """

    def __init__(self, transfers: Transfers):
        self._transfers = transfers
        self._layers: list[_Offloaded] = []
        self._numbers: dict[int, int] = {}  # by the id of a layer, or of a leaf with parameters
        self._slots: list[torch.Tensor] = []
        self._common: torch.Tensor | None = None  # of layers that are not loaded yet
        self._lock = threading.Lock()

    @property
    def groups(self) -> list[Made]:
        """See above."""
        return [each.made for each in self._layers]

    @property
    def nbytes(self) -> int:
        """See above."""
        return sum(len(each.host) for each in self._layers)

    @property
    def slot_bytes(self) -> int:
        """See above."""
        return sum(map(len, self._slots))

    def describe(self) -> str:
        """Returns how much is offloaded, for the start-up table."""
        host, slots = (nbytes / 2**30 for nbytes in (self.nbytes, self.slot_bytes))
        return f"{host:.2f} GiB of weights on the host, in turn in {slots:.2f} GiB of the device"

    # ---------------------------------------------------------------- while weights are loaded

    def release(self, layer: Layer, made: Made) -> None:
        """Enters the next layer, which has just been made, and gives the memory of its weights
        back: until it is loaded, they are where those of others are."""
        new = _Offloaded(layer, made)
        for each in (layer, *made.layers):
            self._numbers[id(each)] = len(self._layers)
        self._layers.append(new)
        parts = group_by_storage(s.destination for of in made.layers for _, s in of.weight_shards())
        loaded = {group[0].untyped_storage().data_ptr(): group for group in parts}
        pieces = [piece for piece in new.find() if piece.storage.data_ptr() in loaded]
        total = sum(padded(piece.nbytes) for piece in pieces)
        if pieces and (self._common is None or len(self._common) < total):
            device = pieces[0].storage.device
            self._common = torch.zeros(total, dtype=torch.uint8, device=device)
        begin = 0
        for piece in pieces:
            assert self._common is not None
            covered = sum(part.nbytes for part in loaded[piece.storage.data_ptr()])
            kept = None if covered == piece.nbytes else piece.memory().cpu()
            new.made_pieces.append((piece.move(self._common, begin), kept))
            begin += padded(piece.nbytes)

    def begin(self, made: Made) -> None:
        """Begins with a layer whose weights are loaded and finalized next."""
        for piece, kept in self._of(made).made_pieces:
            if kept is not None:
                piece.memory().copy_(kept)

    def keep(self, made: Made) -> None:
        """Moves the weights of a layer, which are loaded, to the host. Raises `ConfigError`."""
        new, begin = self._of(made), 0
        for piece in new.find():
            new.pieces.append((piece, begin))
            begin += padded(piece.nbytes)
        try:
            new.host = self._transfers.allocate(begin)
        except RuntimeError as error:
            raise ConfigError(
                f"model.offload_gb: the host has too little memory: {error}"
            ) from error
        common = {made_piece.storage.data_ptr() for made_piece, _ in new.made_pieces}
        for piece, first in new.pieces:
            new.host[first : first + piece.nbytes].copy_(piece.memory())
            if piece.storage.data_ptr() not in common:
                piece.storage.resize_(0)
        new.made_pieces.clear()

    def settle(self, device: torch.device) -> None:
        """Gives the weights of all layers their addresses in the slots. Raises `ConfigError` if
        the slots are larger than what is offloaded."""
        largest = max(len(each.host) for each in self._layers)
        if self.nbytes <= 2 * largest:
            raise ConfigError(
                f"model.offload_gb has to be more than {2 * largest / 2**30:.2f}: two slots of the "
                f"largest layer stay on the device"
            )
        self._slots = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        for number, each in enumerate(self._layers):
            for piece, begin in each.pieces:
                piece.move(self._slots[number % 2], begin)
            each.pieces.clear()  # the layer may have other tensors there later
        self._common = None

    def _of(self, made: Made) -> _Offloaded:
        return next(each for each in self._layers if each.made is made)

    # ---------------------------------------------------------------- while it serves

    def passed(self, layers: Sequence[Layer]) -> Iterator[Layer]:
        """Yields a rank's first layers, each of which has its weights and is launched before the
        next is asked for."""
        transfers = self._transfers
        numbers = [self._numbers[id(each)] for each in layers if id(each) in self._numbers]
        ends: dict[int, Any] = {}

        def start(number: int) -> None:
            if number in numbers:
                host = self._layers[number].host
                ends[number] = transfers.start(self._slots[number % 2][: len(host)], host)

        start(0)
        start(1)
        for layer in layers:
            number = self._numbers.get(id(layer))
            if number is not None:
                transfers.wait(ends.pop(number))
            yield layer
            if number is not None:
                start(number + 2)

    @contextmanager
    def rewriting(self, leaf: Loadable) -> Iterator[None]:
        """Context in which the weights of a leaf are loaded again, while no step is in flight: of
        an offloaded layer they are in its slot, and go to the host at the end."""
        number = self._numbers.get(id(leaf))
        if number is None:
            yield
            return
        host = self._layers[number].host
        with self._lock:
            slot = self._slots[number % 2][: len(host)]
            slot.copy_(host)
            yield
            host.copy_(slot)
