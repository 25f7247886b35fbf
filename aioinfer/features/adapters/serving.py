"""Serving half of adapters: the ones that requests may name."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from aioinfer.checkpoint.source import resolve_folder
from aioinfer.config import Config
from aioinfer.errors import ConfigError, RequestError
from aioinfer.features.adapters.checkpoint import (
    AdapterLayout,
    open_adapter,
    write_adapter,
)
from aioinfer.features.adapters.layers.parts import PROMPT, ModuleShape, rank_of
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.planning import Adapter, Planning
from aioinfer.features.serving import ServingFeature
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.encoder import EncoderModel
from aioinfer.models.encoder_decoder import EncoderDecoderModel
from aioinfer.models.registry import build_model
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeatures


class Serving(ServingFeature):
    """See `ServingFeature`: adapters by name."""

    name = "adapters"

    def __init__(self, config: Config, engines: Callable[[], Iterable[StepFeatures]]):
        super().__init__(config, engines)
        self._by_name: dict[str, Adapter] = {}
        self._numbers = count()
        self._modules: Mapping[str, ModuleShape] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def variants(self) -> Mapping[str, Adapter]:
        """See `ServingFeature.variants`."""
        return self._by_name

    def variant_of(self, params: SamplingParams) -> Adapter | None:
        """See `ServingFeature.variant_of`."""
        return None if params.adapter is None else self.get(params.adapter)

    def get(self, name: str) -> Adapter:
        """Returns the adapter of a name. Raises `RequestError` if there is none."""
        if name not in self._by_name:
            raise RequestError(
                f"there is no adapter {name!r}", param="lora_name", status=404,
                code="model_not_found",
            )  # fmt: skip
        return self._by_name[name]

    async def start(self, folder: Path) -> None:
        """See `ServingFeature.start`: adds the adapters of `lora.adapters`."""
        if self.config.lora.num_slots:  # not while requests run: it takes the interpreter a while
            self._modules = await asyncio.to_thread(adaptable_modules, folder, self.config)
        adds = [self.add(name, path) for name, path in self.config.lora.adapters.items()]
        added = await asyncio.gather(*adds)  # as many at a time as there are threads
        self._by_name = {adapter.name: adapter for adapter in added}

    async def add(self, name: str, path: str, *, replaces: bool = True) -> Adapter:
        """Adds an adapter once its files have been checked; in the place of one with its name,
        which running requests keep.

        Args:
            path: a folder, a hub id or `package:NAME/FOLDER`.
            replaces: whether there may be one with its name.

        Raises:
            ConfigError: it is not there, or not supported, or does not go with the model.
            RequestError: there is one with its name, and it is not to be replaced.
        """
        if not self.config.lora.num_slots:
            raise ConfigError("this server has no adapters: lora.max_adapters is 0")
        if name in self.config.served_model_names:
            raise ConfigError(f"{name!r} is the name of the model")
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._by_name and not replaces:
                raise RequestError(
                    f"there is an adapter {name!r} already: load_inplace replaces it",
                    param="lora_name",
                )
            folder, tokens, digest, sample = await asyncio.to_thread(self._check, path)
            old, key, number = self._by_name.get(name), f"adapter {digest}", next(self._numbers)
            adapter = Adapter(name, str(folder), key, tokens, number, sample)
            self._by_name[name] = adapter
        if old is not None:
            self._forget(old)
        return adapter

    async def add_tensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> Adapter:
        """Adds an adapter that is in memory, as `add` does. Workers read it from a temporary
        folder, which stays until no request has the adapter; arguments and errors as of
        `checkpoint.write_adapter`."""
        folder = Path(tempfile.mkdtemp(prefix="aioinfer-adapter-"))
        try:
            await asyncio.to_thread(write_adapter, folder, tensors, config)
            adapter = await self.add(name, str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(adapter, shutil.rmtree, folder, ignore_errors=True)
        return adapter

    def remove(self, name: str) -> None:
        """Removes an adapter: no further request may name it. Raises `RequestError`."""
        self._forget(self.get(name))
        del self._by_name[name]

    def _forget(self, adapter: Adapter) -> None:
        for features in self.engines():
            features.of(Planning).forget(adapter)

    def _check(self, path: str) -> tuple[Path, int, str, str]:
        """Returns folder, virtual tokens, digest and sample of an adapter. Raises `ConfigError`."""
        folder = resolve_folder(path, "the adapter")
        with open_adapter(folder) as adapter:
            layout = adapter.layout()
            tokens = layout.config.prompt_tokens
            if (prompt := layout.weights.get(PROMPT)) is not None:
                self._check_prompt(folder, prompt.up, tokens)
            else:
                self._check_matrices(folder, layout)
            return folder, tokens, *adapter.digests(layout.runs)

    def _check_matrices(self, folder: Path, layout: AdapterLayout) -> None:
        """Raises `ConfigError` for an adapter that does not go with the model."""
        for module, given in layout.weights.items():
            known = self._modules.get(module)
            if known is None:
                raise ConfigError(f"{folder}: {self._refusal(module)}")
            sides = {"down": tuple(given.down.shape), "up": tuple(given.up.shape)}
            expected = known.of_rank(layout.config.rank_of(module))
            if sides != expected:
                raise ConfigError(
                    f"{folder}: the matrices of {module} have the shapes {sides}, and not "
                    f"{expected}: it is an adapter of another model, or its rank is another"
                )
        rank, most = rank_of(layout.weights), self.config.lora.max_rank
        if rank > most:
            raise ConfigError(f"{folder} has rank {rank}, and the server's lora.max_rank is {most}")

    def _check_prompt(self, folder: Path, vectors: torch.Tensor, tokens: int) -> None:
        """Raises `ConfigError` for a soft prompt that does not go with the model."""
        known = self._modules.get(PROMPT)
        if known is None:
            raise ConfigError(f"{folder} is a soft prompt, and lora.targets lacks 'prompts'")
        if vectors.shape != (tokens, known.inputs):
            raise ConfigError(
                f"{folder}: the soft prompt has the shape {tuple(vectors.shape)}, and not "
                f"{(tokens, known.inputs)}: it is of another model"
            )
        if tokens > known.out:
            raise ConfigError(
                f"{folder} has {tokens} virtual tokens, and a soft prompt may have {known.out}"
            )

    def _refusal(self, module: str) -> str:
        """Returns why adapters cannot change a module."""
        text = f"adapters cannot change {module} of this model"
        targets, is_in_layer = self.config.lora.targets, any(map(str.isdigit, module.split(".")))
        if ".experts." in module and "experts" not in targets:
            text += ": lora.targets lacks 'experts'"
        elif not is_in_layer and "embeddings" not in targets:
            text += ": lora.targets lacks 'embeddings'"
        return text


def adaptable_modules(folder: Path, config: Config) -> Mapping[str, ModuleShape]:
    """Returns the checkpoint's modules that adapters may change, of the model in a folder; empty if
    it is not built from our layers. Raises `ConfigError` for a model with an encoder."""
    device, group = torch.device("meta"), ParallelGroup(0, 1)
    backend = Backend(device, torch.float32, group)
    lora = replace(config.lora, max_adapters=1, max_rank=1)
    backend.extension = slots = AdapterSlots(lora, backend)
    model = build_model(folder, backend, config.model)
    if isinstance(model, (EncoderModel, EncoderDecoderModel)):
        raise ConfigError("adapters (lora) are not supported for models with an encoder")
    if not isinstance(model, DecoderModel):
        return {}
    return slots.modules
