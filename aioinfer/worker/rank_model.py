"""The layers that a rank has: of the model, of its drafter, and what a feature adds to them.

`Worker` makes a `RankModel`, has it load the weights, and binds it to each KV cache that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVSpec, StateSpec
from aioinfer.layers.backend import Backend, Offload, Transfers
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.models.drafters.registry import build_drafter
from aioinfer.models.registry import build_model
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.memory import check_weights, report_shortage
from aioinfer.worker.peers import Peers
from aioinfer.worker.pinned_memory import GpuTransfers
from aioinfer.worker.rank_memory import RankMemory
from aioinfer.worker.step_works import extend_layers


class RankModel:
    """The rank's part of the model, and of its drafter, if it has one.

    Attributes:
        model: the rank's part.
        drafter: None on the stages of a pipeline before the last one, too.
    """

    drafter: Drafter | None = None
    _drafter_specs: Sequence[Sequence[KVSpec]] = ()

    def __init__(
        self, config: Config, folder: Path, backend: Backend, peers: Peers, served_len: int
    ):
        """Makes the layers, their weights unset.

        Args:
            config: the whole configuration.
            folder: the folder of the model.
            backend: the layers'.
            peers: the ranks that it computes with.
            served_len: the longest sequence that may be served.

        Raises:
            ConfigError: the configuration does not go with the model, or memory is too short.
        """
        self._config, self._folder, self._backend, self._peers = config, folder, backend, peers
        with report_shortage("the weights", "take a smaller model, or more tensor-parallel ranks"):
            self._extension = backend.extension = extend_layers(config, backend)
            offload = backend.offload = self._make_offload()
            self.model = build_model(folder, backend, config.model, config.media)
            backend.extension = backend.offload = None  # a drafter has none
            if offload is not None and getattr(self.model, "offloaded", None) is None:
                raise ConfigError("model.offload_gb: only layers of decoders can be offloaded")
            drafter = build_drafter(config, self.model, served_len)
        if drafter is not None:
            made, self._drafter_folder = drafter
            self.model.tapped_layers = made.tapped_layers
            self.drafter = made if backend.is_last_stage else None
            self._drafter_specs = made.kv_specs
            if any(isinstance(spec, StateSpec) for of in made.kv_specs for spec in of):
                raise ConfigError(
                    "speculation.model: a model whose layers keep states cannot draft"
                )

    def _make_offload(self) -> Offload | None:
        """Returns what is to be offloaded, if anything is. Raises `ConfigError` where that cannot
        be."""
        backend = self._backend
        nbytes = int(self._config.model.offload_gb * 2**30)
        if not nbytes:
            return None
        if backend.expert_group is not None:
            raise ConfigError("model.offload_gb: not with experts that engines have in common")
        transfers = self._make_transfers()
        # a dependent launch may read weights before the event that it waits for; and products would
        # be timed with copies beside them
        backend.pdl = False
        return Offload(nbytes, transfers)

    def _make_transfers(self) -> Transfers:
        """Returns the copies of offloaded weights. Raises `ConfigError` on a CPU."""
        if self._backend.device.type == "cpu":
            raise ConfigError("model.offload_gb: on a CPU all weights are in memory of the host")
        return GpuTransfers(self._backend.device)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the model's weights, and of its drafter's."""
        own = 0 if self.drafter is None else self.drafter.weights_bytes
        return self.model.weights_bytes + own

    @property
    def kv_specs(self) -> Sequence[Sequence[KVSpec]]:
        """What each layer keeps in the KV cache; the drafter's layers are numbered behind the
        model's."""
        return [*self.model.kv_specs, *self._drafter_specs]

    @property
    def layer_numbers(self) -> range:
        """Which of these layers the rank has."""
        layers = self.model.layer_numbers
        return layers if self.drafter is None else range(layers.start, len(self.kv_specs))

    def load(self, on_progress: Callable[[int, int], None], memory: RankMemory | None) -> None:
        """Loads the weights, and has `memory` take them, where the rank can sleep.

        Args:
            on_progress: called with the bytes that are loaded and the total.
            memory: of the rank.

        Raises:
            ConfigError: they cannot be loaded, or memory is too short.
        """
        config, backend, extension = self._config, self._backend, self._extension
        form, seed = config.model.load_format, config.model.seed
        if backend.device.type == "cpu":
            check_weights(config, self.weights_bytes, backend.dtype, self._peers.groups.spec)
        self.model.load(self._folder, form, seed, on_progress)
        if self.drafter is not None:
            self.drafter.load(self._drafter_folder, form, seed, on_progress)
        if memory is not None:
            with report_shortage("the weights", "model.sleep_mode takes 256 MiB more at the start"):
                memory.take_weights([self.model, self.drafter])
        if extension is not None and extension.is_used:
            with report_shortage(*extension.shortage):
                extension.allocate(config.max_step_tokens, config.scheduler.max_num_seqs)
            backend.extension = extension

    def warm_up(self) -> None:
        """Launches the products that steps have computed before, and those of experts, in every
        configuration that the number of rows selects."""
        self._backend.choices.warm_up()
        self.model.warm_up()
        if self.drafter is not None:
            self.drafter.warm_up()

    def bind(self, kv: KVTensors, block_size: int, rows: int, tokens: int) -> None:
        """Gives the layers their KV caches, and sums over the ranks.

        Args:
            kv: of all layers that the rank has.
            block_size: tokens a KV block.
            rows, tokens: the maxima of a step.

        Raises:
            ConfigError: the drafter cannot be used.
        """
        of_model, of_drafter = kv.divided(len(self.model.layer_numbers))
        self._peers.connect_all_reduce(self._backend, self.model.hidden_size)
        self.model.bind(*of_model, block_size, rows, tokens)
        if (drafter := self.drafter) is None:
            return
        self._peers.connect_all_reduce(drafter.backend, drafter.hidden_size)
        drafter.bind(*of_drafter, block_size, rows, tokens)
        if self._backend.device.type != "cpu" and not drafter.supports_graphs:
            raise ConfigError(
                "speculation: the kernels lack the shape of a layer of the model that drafts"
            )
