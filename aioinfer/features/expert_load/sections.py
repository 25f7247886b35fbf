"""The section of a result in which a worker reports how many tokens each expert was given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class ExpertTokens(Section):
    """The tokens of each copy of an expert since the last report, in L layers of P places at most
    (see `ipc.expert_placement`). The first rank of an engine reports them every few seconds, for
    all ranks: each routes every token.

    Attributes:
        layers: int32 [L], the numbers of the layers in the model.
        experts: int32 [L, P], the expert of each place; -1 where a layer has fewer places.
        ranks: int32 [L, P], the rank that computes it; -1 where all ranks compute a part of it.
        tokens: int32 [L, P], the tokens; modulo 2 ** 32.
    """

    layers: I32 = array(np.int32)
    experts: I32 = array(np.int32, ndim=2)
    ranks: I32 = array(np.int32, ndim=2)
    tokens: I32 = array(np.int32, ndim=2)
