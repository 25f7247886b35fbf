"""Fallback for models without a file here: the modules of transformers over our paged attention,
scheduler and sampler.

Attention is replaced through transformers' attention interface, so it serves every decoder whose
attention modules go through that. Steps are computed module by module, without CUDA graphs. Over
several ranks, linear layers are split by the model's own `tp_plan`. A model that cannot run raises
`ConfigError` at the start.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.kv_cache import KVCache, KVScales
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.part_maker import describe_mixers
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard
from aioinfer.layers.step import Step
from aioinfer.models.config import read_dtype
from aioinfer.models.fallback_attention import PagedAttention, attend
from aioinfer.models.json_file import read_json
from aioinfer.models.text_model import lay_over
from aioinfer.models.vision.tower import Tower

#: The name under which transformers finds our attention.
_INTERFACE = "aioinfer_paged"
#: Kinds of layers whose attention is causal over keys and values, by transformers' names.
_LAYER_KINDS = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """A model's shape, as transformers reads it.

    Attributes:
        architecture: the name of its class.
        vocab_size, hidden_size, num_layers: of the model.
        max_len: the longest sequence that the model was made for.
        dtype: of the checkpoint.
        has_tp_plan: whether transformers has a `tp_plan` for it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int
    dtype: torch.dtype
    has_tp_plan: bool
    generates: ClassVar[bool] = True

    @classmethod
    def load(cls, folder: Path, options: ModelConfig) -> FallbackConfig:
        """Reads `config.json` of a model folder; `options` is the section `[model]`.

        Raises:
            ConfigError: transformers does not know the model, or it is none that we can run.
        """
        config = _read_config(folder, options)
        name = (config.architectures or ["a model without architectures"])[0]
        text = config.get_text_config()
        kinds = {kind for kind in getattr(text, "layer_types", None) or () if kind}
        if config.is_encoder_decoder or not name.endswith(("ForCausalLM", "LMHeadModel")):
            raise ConfigError(f"{name} is not a decoder that generates text")
        if unknown := kinds.difference(_LAYER_KINDS):
            raise ConfigError(f"{name} has layers that are not supported: {', '.join(unknown)}")
        return cls(
            architecture=name,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            max_len=getattr(text, "max_position_embeddings", None) or 2048,
            dtype=read_dtype(text.to_dict()),
            has_tp_plan=bool(getattr(text, "base_model_tp_plan", None)),
        )

    def check_tensor_parallel(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raises `ConfigError` if `size` ranks cannot share the model."""
        if expert_parallel:
            raise ConfigError(
                f"parallel.expert_parallel = true is not supported for {self.architecture}, which "
                "transformers' modules compute"
            )
        if size > 1 and not self.has_tp_plan:
            raise ConfigError(
                f"parallel.tensor_parallel_size = {size}, but transformers has no plan (tp_plan) "
                f"by which ranks could share {self.architecture}: set it to 1"
            )

    def check_pipeline_parallel(self, size: int) -> None:
        """Raises `ConfigError` if there are several stages."""
        if size > 1:
            raise ConfigError(
                f"parallel.pipeline_parallel_size = {size} is not supported for "
                f"{self.architecture}, which transformers' modules compute: set it to 1"
            )


def _read_config(folder: Path, options: ModelConfig) -> Any:
    trust_remote_code, overrides = options.trust_remote_code, options.hf_overrides
    try:
        merged = lay_over(read_json(folder / "config.json"), overrides)
        changed = {name: merged[name] for name in overrides}
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **changed)
    except Exception as error:  # each model's configuration checks itself in its own way
        remedy = ""
        if "auto_map" in (folder / "config.json").read_text("utf-8") and not trust_remote_code:
            remedy = (
                " (code that the checkpoint brings runs only with model.trust_remote_code = true)"
            )
        raise ConfigError(
            f"transformers cannot read the model in {folder}{remedy}: {error}"
        ) from error


class FallbackModel:
    """Implements `CausalLM` with transformers' modules.

    The hidden states that `finish` returns are the logits already: the model itself applies the
    scales and caps of its head.
    """

    def __init__(self, config: FallbackConfig, backend: Backend, options: ModelConfig):
        config.check_tensor_parallel(backend.group.size, expert_parallel=backend.expert_parallel)
        config.check_pipeline_parallel(backend.num_stages)
        self.backend = backend
        self.layer_numbers = range(config.num_layers)
        self.finishes_with_hidden_states = False
        self.has_rotary_sections = self.has_token_types = False
        self.scores_tokens = True
        self.hidden_size = self.stream_size = config.hidden_size
        # every rank has all logits, and samples the same tokens from them
        self.vocabulary = Vocabulary(config.vocab_size, ParallelGroup.single())
        self.kv_specs: Sequence[Sequence[KVSpec]] = ()
        self.kv_scales: Mapping[int, KVScales] = {}
        self.expert_counters: Sequence[ExpertCounter] = ()
        self.tower: Tower | None = None
        self.tapped_layers: Sequence[int] = ()
        self.weights_bytes = 0
        self._config = config
        self._options = options
        self._model: Any = None
        self._attentions: list[PagedAttention] = []
        self._plans: Any = None

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """See `CausalLM.load`. Each rank reads all weights, and keeps its part."""
        AttentionInterface.register(_INTERFACE, attend)
        options: dict[str, Any] = {
            "attn_implementation": _INTERFACE,
            "trust_remote_code": self._options.trust_remote_code,
            "dtype": self.backend.dtype,
        }
        config = _read_config(folder, self._options)
        try:
            if load_format in ("dummy", "dummy_skewed"):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, **options)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ConfigError(f"transformers cannot load {folder}: {error}") from error
        model = model.eval().requires_grad_(False)
        if self.backend.group.size > 1:
            _split(model, self.backend.group)
        self._model = model.to(self.backend.device)
        _settle_longrope(model, self._options.max_model_len or self._config.max_len)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        on_progress(self.weights_bytes, self.weights_bytes)
        self._find_attentions()

    @torch.inference_mode()
    def _find_attentions(self) -> None:
        """Runs two tokens through the model to see which attention each layer uses.

        Raises:
            ConfigError: a layer computes something else than causal attention over keys and values.
        """
        found: dict[int, PagedAttention] = {}
        for module in self._model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.paged_attention = PagedAttention(module, found)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.backend.device)
        self._forward(tokens, torch.arange(2, device=self.backend.device)[None], None)
        if sorted(found) != list(range(self._config.num_layers)):
            raise ConfigError(
                f"{self._config.architecture} has {self._config.num_layers} layers, of which "
                f"{len(found)} compute attention through transformers' attention interface: the "
                "others cannot be served"
            )
        self._attentions = [found[number] for number in sorted(found)]
        self.kv_specs = [(attention.shape.kv_spec,) for attention in self._attentions]
        heads = [attention.shape.num_kv_heads for attention in self._attentions]
        self.kv_scales = {n: self._make_scales(count) for n, count in enumerate(heads)}

    def _make_scales(self, num_kv_heads: int) -> KVScales:
        """Returns the scales of a layer of which this rank has so many KV heads; the ranks share no
        head."""
        rank, size = self.backend.group.rank, self.backend.group.size
        heads = Shard(rank * num_kv_heads, num_kv_heads, size * num_kv_heads)
        return KVScales("", heads, self.backend.device)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the logits [S or T, vocab_size] of tokens [1, T], of `rows` (int64 [S]) alone if
        they are given."""
        given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        selects = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        if rows is not None and selects:
            given["logits_to_keep"] = rows
        logits = self._model(input_ids=input_ids, **given).logits[0]
        return logits[rows] if rows is not None and not selects else logits

    # ---------------------------------------------------------------- steps

    def bind(
        self,
        groups: Sequence[KVGroup],
        kv: Sequence[torch.Tensor],
        block_size: int,
        rows: int,
        tokens: int,
    ) -> None:
        """See `CausalLM.bind`."""
        self._plans = self._make_plans(block_size, rows, tokens)
        for number, (group, tensors) in enumerate(zip(groups, kv, strict=True)):
            for index, layer in enumerate(group.layers):
                cache = KVCache.of_layer(tensors[:, index], self.kv_scales[layer])
                self._attentions[layer].bind(cache, number, self._plans, self.backend)

    def _make_plans(self, block_size: int, rows: int, tokens: int) -> Any:
        if not self.backend.has_kernels or self._lacking(block_size):
            return None
        from aioinfer.layers.kernel_attention import AttentionPlans

        backend = self.backend
        return AttentionPlans(rows, tokens, backend.dtype, cascade=backend.cascade)

    def _lacking(self, block_size: int) -> list[str]:
        """Returns the head sizes that the attention kernels lack with such blocks."""
        from aioinfer.layers.kernel_attention import supports

        shapes = [attention.shape for attention in self._attentions]
        lacking = (shape.head_size for shape in shapes if not supports(shape, block_size))
        return [f"head size {size}" for size in sorted(set(lacking))]

    def looks_ahead(self, block_size: int) -> bool:
        """See `CausalLM.looks_ahead`."""
        return True

    def describe(self, block_size: int) -> str:
        """See `CausalLM.describe`."""
        modules = f"transformers' modules of {self._config.architecture}, step by step"
        if not self.backend.has_kernels:
            return f"{modules}; attention: plain torch"
        return f"{modules}; attention: {describe_mixers(self._lacking(block_size), block_size)}"

    @property
    def supports_graphs(self) -> bool:
        """False: transformers' modules may do work that a graph cannot hold."""
        return False

    @property
    def supports_prefill_graphs(self) -> bool:
        """False, as `supports_graphs`."""
        return False

    def warm_up(self) -> None:
        """See `CausalLM.warm_up`; no kernel has several configurations here."""

    def connect_experts(self, max_tokens: int) -> None:
        """See `CausalLM.connect_experts`: there are none."""

    def take_part(self) -> None:
        """See `CausalLM.take_part`: no engine waits for another."""

    def plan(self, step: Step) -> None:
        """See `CausalLM.plan`."""
        if self._plans is not None:
            self._plans.fill(step)

    def begin(
        self,
        step: Step,
        out: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
        num_layers: int | None = None,
    ) -> ResidualStream:
        """Computes nothing: see `finish`."""
        return ResidualStream(torch.empty(0, self.hidden_size), self.backend)

    def finish(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """Computes the model. Returns the logits [S or T, vocab_size]."""
        inputs = step.inputs
        rows = None if step.sampled is None else step.sampled.last.long()
        for attention in self._attentions:
            attention.step = step
        return self._forward(inputs.input_ids.long()[None], inputs.positions.long()[None], rows)

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns `hidden`, the result of `finish`, which is the logits."""
        return hidden if self.backend.has_kernels else hidden.float()

    def finish_all(self, step: Step, stream: ResidualStream) -> torch.Tensor:
        """Computes the model without its head. Returns hidden states [T, hidden_size] after its
        last norm."""
        inputs = step.inputs
        for attention in self._attentions:
            attention.step = step
        return self._model.base_model(
            input_ids=inputs.input_ids.long()[None],
            position_ids=inputs.positions.long()[None],
            use_cache=False,
        ).last_hidden_state[0]

    def logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.logits_of`. The model's own code computes them, with its scales and caps:
        it is called with its decoder replaced by one that returns `hidden`."""
        prefix = self._model.base_model_prefix
        modules, decoder = self._model._modules, self._model.base_model
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        modules[prefix] = _GivenStates(hidden)
        try:
            logits = self._forward(nothing, nothing, None)
        finally:
            modules[prefix] = decoder
        return logits if self.backend.has_kernels else logits.float()

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden`, the result of `finish_all`, which is normed."""
        return hidden


class _GivenStates(nn.Module):
    """Stands in for a decoder: returns hidden states [T, hidden_size] that are known."""

    def __init__(self, states: torch.Tensor):
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self._states[None])


# -------------------------------------------------------------------- tensor parallelism


class _Split(nn.Module):
    """A linear layer of which this rank has some output features (colwise), or some input features,
    whose products are summed over the ranks (rowwise)."""

    def __init__(self, linear: nn.Linear, group: ParallelGroup, *, by_rows: bool):
        super().__init__()
        features = linear.weight.shape[0 if by_rows else 1]
        if features % group.size:
            raise ConfigError(
                f"parallel.tensor_parallel_size = {group.size} does not divide {features} features"
            )
        part = slice(group.rank * features // group.size, (group.rank + 1) * features // group.size)
        weight = linear.weight[part] if by_rows else linear.weight[:, part]
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        bias: torch.Tensor | None = linear.bias
        if bias is not None:
            bias = nn.Parameter((bias[part] if by_rows else bias).clone(), requires_grad=False)
        self.bias = bias
        self._sum: Any = None
        if not by_rows:
            self._sum = group.all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._sum is None:
            return F.linear(x, self.weight, self.bias)
        total = self._sum(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def _split(model: Any, group: ParallelGroup) -> None:
    """Splits the linear layers of a model by its `tp_plan`. Embedding and head stay whole.

    Raises:
        ConfigError: the plan has another style than colwise and rowwise, or does not divide.
    """
    base = model.base_model
    plan: dict[str, str] = dict(getattr(base, "_tp_plan", None) or base.config.base_model_tp_plan)
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+") + "$"), style)
        for name, style in plan.items()
    ]
    for name, module in list(base.named_modules()):
        style = next((style for pattern, style in patterns if pattern.match(name)), None)
        if style is None or isinstance(module, nn.Embedding):
            continue
        if style in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            parent = base.get_submodule(name.rpartition(".")[0])
            split = _Split(module, group, by_rows=style == "colwise")
            setattr(parent, name.rpartition(".")[2], split)
        elif not style.startswith("replicated"):
            raise ConfigError(
                f"transformers' plan for {type(model).__name__} has {name} as {style!r}, which is "
                "not supported: set parallel.tensor_parallel_size to 1"
            )


def _settle_longrope(model: nn.Module, served_len: int) -> None:
    """Has all texts rotated by the factors of "longrope" that those of `served_len` tokens have.
    Modules of transformers take the factors of the longest text of a call, which has tokens of
    several requests here, and keys in the cache that are not rotated again."""
    rotary: Any
    for rotary in model.modules():
        if getattr(rotary, "rope_type", None) == "longrope":
            compute = ROPE_INIT_FUNCTIONS["longrope"]
            inverse, _ = compute(rotary.config, rotary.inv_freq.device, seq_len=served_len)
            rotary.inv_freq.copy_(inverse)
            rotary.rope_type = "default"  # which modules leave as it is
