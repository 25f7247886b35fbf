"""The inputs of a step, which every layer reads, on any device.

The worker's runner makes them from the slots. R rows (requests), T tokens, S sampled rows; decodes
(rows of one token that is sampled) come before all other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from aioinfer.layers.pictures import StepPictures


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Slot mapping and block tables of a step for one KV group.

    Attributes:
        slot_mapping: int64 [T], block * block_size + offset of each token; -1 in padding. Of
            states it says no more than which tokens are padding.
        block_tables: int32 [R, max_blocks]; entries past a row's length may be any block. Of
            states, an entry may be negative: no block (see `ipc.kv_spec`).
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows and tokens of a step. Rows and tokens past the step's own are padding.

    Attributes:
        input_ids, positions: int32 [T]; 0 in padding.
        query_starts: int32 [R + 1], the first token of each row; padding rows are empty.
        seq_lens: int32 [R], tokens of each row that are in the cache once this step's are written;
            0 for padding rows.
        groups: one for each KV group.
        rotary: int32 [T], or [3, T] for tables with sections (see `rotary.Sections`): where rotary
            embeddings place each token; None: at its position.
        replays: where layers with a state look ahead; else None.
        token_types: int32 [T], 0 for tokens of the first text of a pair and 1 for tokens of the
            second, in models that tell them apart; None in others.
        slots: integers [R], the slot of each row; None in graphs of layers, which are replayed for
            any rows, and in passes of a drafter.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    groups: tuple[GroupInputs, ...]
    rotary: torch.Tensor | None = None
    replays: Replays | None = None
    token_types: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    @property
    def rotary_positions(self) -> torch.Tensor:
        """int32 [T] or [3, T]: see `rotary`."""
        return self.positions if self.rotary is None else self.rotary

    @property
    def token_places(self) -> torch.Tensor:
        """int64 [T], negative in padding: the slot mapping of any group, which tells both apart
        whatever the group keeps."""
        return self.groups[0].slot_mapping


class Replays(NamedTuple):
    """What layers with a state do beside a step's own tokens where rows may look ahead (see
    `ipc.lookahead`). R rows, int32 [R] each.

    The state of a sequence in memory is never behind a row that may be skipped: a step writes the
    state behind the first of a slot's rows of one token, and keeps the inputs of the others. The
    slot's next step begins with the inputs of those that were not skipped.

    Attributes:
        slots: the slot of each row.
        pending: of how many tokens a row replays the inputs first. They are computed between the
            state in memory and the row.
        counts: of the first of adjacent rows of a slot, how many there are; 0 for the others and
            for padding.
    """

    slots: torch.Tensor
    pending: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that sample their next token, in any order.

    Attributes:
        rows: int32 [S], which rows.
        last: int32 [S], the last token of each, as an index of the step's tokens.
        seq_lens: int32 [S], of these rows, as in `StepInputs`.
        rotary: int32 [S] or [3, S], of their last tokens, as in `StepInputs`.
    """

    rows: torch.Tensor
    last: torch.Tensor
    seq_lens: torch.Tensor
    rotary: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: StepInputs, rows: torch.Tensor, last: torch.Tensor) -> SampledRows:
        """Returns `rows` (int32 [S]) of a step, with their last tokens `last` (int32 [S])."""
        rotary = None if inputs.rotary is None else inputs.rotary.index_select(-1, last)
        return cls(rows, last, inputs.seq_lens.index_select(0, rows), rotary)


@dataclass(frozen=True, slots=True)
class HostRows:
    """The lengths of a step's rows on the host, for code that computes in plain torch.

    Attributes:
        query_lens: the tokens of each row in this step.
        seq_lens: `StepInputs.seq_lens`.
    """

    query_lens: list[int]
    seq_lens: list[int]


@dataclass(slots=True)
class Step:
    """A step, as the layers see it.

    Attributes:
        inputs: the rows.
        num_decodes: how many of the first rows have exactly one token and are sampled. None: the
            attention plans on the GPU have it, so that a graph may be replayed for any number.
        sampled: if given, the step's hidden states are wanted for the last tokens of these rows
            alone; else for all tokens.
        host: the rows' lengths; None inside a graph.
        has_prefill: whether there may be rows beyond the decodes.
        has_lookahead: whether several rows may be of one sequence (see `ipc.lookahead`): attention
            then begins once all keys of the step are in the cache.
        shares_prefix: whether attention looks for a prefix that decodes share, where it can.
        taps: [T, taps, hidden_size], where the model copies the streams before its `tapped_layers`;
            None where nothing reads them.
        pictures: the embeddings of pictures among the tokens; None where there are none.
        prompts: the vectors of soft prompts among the tokens, likewise.
        offsets: int32 [R], of a decode step with lookahead, the number of each row among the
            adjacent rows of its sequence; None in other steps.
        padded: tokens that a graph of the layers computes, with padding, if it computes the step.
        memo: values that layers have computed for the step and other layers may use, by their own
            keys.
    """

    inputs: StepInputs
    num_decodes: int | None
    sampled: SampledRows | None = None
    host: HostRows | None = None
    has_prefill: bool = True
    has_lookahead: bool = False
    shares_prefix: bool = True
    taps: torch.Tensor | None = None
    pictures: StepPictures | None = None
    prompts: StepPictures | None = None
    offsets: torch.Tensor | None = None
    padded: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)
