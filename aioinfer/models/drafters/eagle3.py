"""EAGLE-3 heads (Li et al. 2025): a drafter of one layer that reads the target's residual stream
before three of its layers.

The streams of a position are projected together to one hidden state (`fc`). The layer's attention
reads the normed embedding of the position's next token beside the normed hidden state, twice as
wide as the stream; an MLP follows. The output takes the place of the projected streams in the next
pass, and, behind a norm, gives logits over a reduced vocabulary, whose tokens `d2t` maps to the
target's (target token = draft token + d2t[draft token]).

Two layouts of checkpoints are read: that of the authors and SpecForge (`LlamaForCausalLMEagle3`),
whose layer is `midlayer`, and that of the library speculators (`Eagle3Speculator`), whose layer is
`layers.0`, and whose configuration has the layer's in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.layers.embedding import LMHead, Vocabulary
from aioinfer.layers.layer import Layer
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard
from aioinfer.layers.step import Step
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.drafters.drafter import LayerDrafter
from aioinfer.models.json_file import read_json
from aioinfer.models.llama import LlamaConfig
from aioinfer.models.loader import locate_tensors

_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The configuration of a head.

    Attributes:
        layer: of its layer, norms and vocabulary.
        draft_vocab_size: tokens of the reduced vocabulary.
        tapped_layers: see `Drafter`; empty for the default of a target.
        norms_residual: whether the stream that attention adds to is the normed hidden state.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    tapped_layers: tuple[int, ...] = ()
    norms_residual: bool = False

    @classmethod
    def load(cls, folder: Path) -> Eagle3Config:
        """Reads `config.json` of a folder. Raises `ConfigError` if it lacks a field, or the head is
        of another kind."""
        file = folder / "config.json"
        given = read_json(file)
        own = given.get("transformer_layer_config") or given
        extra = given.get("eagle_config") or {}
        taps = given.get("eagle_aux_hidden_state_layer_ids")
        if taps is None and extra.get("eagle_aux_hidden_state_layer_ids"):
            # numbers of layers whose output is read
            taps = [number + 1 for number in extra["eagle_aux_hidden_state_layer_ids"]]
        if given.get("norm_before_fc") or len(taps or range(_TAPS)) != _TAPS:
            raise ConfigError(f"{file}: EAGLE-3 heads of this kind are not supported")
        try:
            layer = LlamaConfig.read({"num_hidden_layers": 1, **own})
            size = given.get("draft_vocab_size") or layer.vocab_size
        except KeyError as error:
            raise ConfigError(f"{file} lacks {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        norms_residual = bool(given.get("norm_before_residual", False))
        return cls(layer, size, tuple(taps or ()), norms_residual)

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers of a target of `num_layers` layers before which its stream is read: by
        default those that the authors take. Raises `ConfigError` if there are no such layers."""
        taps = self.tapped_layers or (2, num_layers // 2, num_layers - 3)
        if not all(0 <= number < num_layers for number in taps):
            raise ConfigError(
                f"speculation.model reads the stream before the layers {list(taps)} of a model "
                f"that has {num_layers}"
            )
        return taps


def is_eagle3(folder: Path) -> bool:
    """Whether the checkpoint in a folder is a head of one of both layouts. Raises `ConfigError` if
    it has no `config.json`."""
    given = read_json(folder / "config.json")
    return any("eagle3" in str(name).lower() for name in given.get("architectures") or ())


class DraftVocabulary:
    """The token ids of the reduced vocabulary.

    Args:
        size: how many there are.
        vocabulary: the target's, of which this rank has a shard.
        device: of the rank.
        is_stored: whether the checkpoint has them; else they are the first of the target's.

    Attributes:
        columns: int64 [C], the draft tokens that are in the rank's shard; None for all.
        places: int64 [C], where they are in the shard.
    """

    def __init__(self, size: int, vocabulary: Vocabulary, device: torch.device, *, is_stored: bool):
        self._offsets = torch.zeros(size, dtype=torch.int64, device=device)
        self._vocabulary, self._is_stored = vocabulary, is_stored
        self.columns: torch.Tensor | None = None
        self.places = self._offsets

    def weight_shards(self) -> NamedShards:
        """Yields the distance of each draft token to the target's token."""
        if self._is_stored:
            yield "d2t", WeightShard(self._offsets)

    def finalize(self) -> None:
        """Finds the draft tokens of this rank's shard. Raises `ConfigError` if the target does not
        have one of the tokens."""
        vocabulary = self._vocabulary
        ids = self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary.vocab_size:
            raise ConfigError(
                f"speculation.model drafts tokens that the model does not have: it was made for "
                f"another vocabulary than one of {vocabulary.vocab_size} tokens"
            )
        local = ids - vocabulary.start
        if vocabulary.group.size > 1:
            is_local = (local >= 0) & (local < vocabulary.local_size)
            self.columns = is_local.nonzero()[:, 0]
            local = local[is_local]
        self.places = local


class Eagle3Drafter(LayerDrafter):
    """Implements `Drafter` for an EAGLE-3 head. Every rank has its projection and its head whole;
    its layer is sharded as the target's are.

    Args:
        config: of the head.
        target: whose embedding it takes if the checkpoint has none.
        make: makes its parts.
        tensors: names of the checkpoint's tensors; empty for random weights.

    Raises:
        ConfigError: it does not go with the target.
    """

    def __init__(
        self, config: Eagle3Config, target: DecoderModel, make: LayerMaker, tensors: Sequence[str]
    ):
        super().__init__(make)
        own, size, backend = config.layer, make.hidden_size, make.backend
        self.tapped_layers = config.taps_of(len(target.kv_specs))
        self.vocabulary = target.vocabulary
        name = "layers.0" if any(each.startswith("layers.0.") for each in tensors) else "midlayer"
        if "embed_tokens.weight" in tensors:
            self._embedding = make.embedding("embed_tokens", target.vocabulary.vocab_size)
        elif target.embedding is not None and target.hidden_size == size:
            self._embedding = target.embedding
        else:
            raise ConfigError("speculation.model has no embedding of its own and another width")
        self._projection = make.column(
            [Source("fc", Shard.whole(size))], _TAPS * target.hidden_size
        )
        self._input_norm = make.norm(f"{name}.input_layernorm")
        self._hidden_norm = make.norm(f"{name}.hidden_norm")
        self._norms_residual = config.norms_residual
        attention = make.attention(
            f"{name}.self_attn", **own.attention_shape(0), norm=None, bias=own.attention_bias,
            input_size=2 * size,
        )  # fmt: skip
        mlp = make.gated_mlp(
            f"{name}.mlp", own.intermediate_size, activation=own.activation,
            norm=make.norm(f"{name}.post_attention_layernorm"),
        )  # fmt: skip
        self._attention, self._mlp = attention, mlp
        self.layers = [Layer([attention, mlp])]
        self._norm = make.norm("norm")
        # every rank scores all draft tokens: those of its shard are not adjacent
        reduced = Vocabulary(config.draft_vocab_size, ParallelGroup.single())
        self._head = make.keep(make.count(LMHead("lm_head", reduced, size, backend)))
        self._ids = make.keep(
            DraftVocabulary(
                config.draft_vocab_size, target.vocabulary, backend.device,
                is_stored="d2t" in tensors,
            )
        )  # fmt: skip
        self._count_weights()

    def bind(
        self, groups: Sequence[KVGroup], kv: Sequence[torch.Tensor], block_size: int, rows: int,
        tokens: int, programs: int | None = None,
    ) -> None:  # fmt: skip
        """See `Drafter.bind`."""
        super().bind(groups, kv, block_size, rows, tokens, programs)
        backend = self.backend
        dtype = backend.dtype if backend.has_kernels else torch.float32
        # of tokens that are not drafted it stays so
        self._scores = torch.full(
            (rows, self.vocabulary.local_size), -torch.inf, dtype=dtype, device=backend.device
        )

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter.combine`."""
        return self._projection(hidden.flatten(1))

    def forward(self, hidden: torch.Tensor | None, step: Step) -> torch.Tensor:
        """See `Drafter.forward`. `hidden` may be written to."""
        assert hidden is not None
        normed = self._hidden_norm(hidden)
        embedded = self._embedding(step.inputs.input_ids).hidden
        joined = torch.cat((self._input_norm(embedded), normed), dim=1)
        stream = ResidualStream(normed if self._norms_residual else hidden, self.backend)
        with stream.reading(joined):
            self._attention(stream, step, is_last=True)
        if len(stream):
            self._mlp(stream, step)
        return stream.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Drafter.logits`."""
        logits, columns = self._head(hidden, self._norm), self._ids.columns
        if columns is not None:
            logits = logits.index_select(1, columns)
        return self._scores[: len(logits)].index_copy_(1, self._ids.places, logits)


def make_eagle3(
    folder: Path, target: DecoderModel, make: LayerMaker, load_format: str
) -> Eagle3Drafter:
    """Returns the head in a folder for a target, its weights unset. Raises `ConfigError`."""
    tensors = () if load_format.startswith("dummy") else tuple(locate_tensors(folder))
    return Eagle3Drafter(Eagle3Config.load(folder), target, make, tensors)
