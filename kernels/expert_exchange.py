"""All-to-all of tokens for expert parallelism with data-parallel attention, over symmetric memory:
tokens are sent to the ranks of their experts, and the outputs back.

Behind `expert_routing.route` and around the products of `expert_product`, four launches without a
copy on the host, whose grids depend on the number of own tokens and on the layout alone. Ranks may
have any numbers of tokens, none included, and launch them one by one or from a graph:

- `_send_kernel` writes each token's row, once, into the memory of every rank that has any of its
  experts, with the places there and the weights of all its pairs. The place of a row is given by
  the sending rank and the number of the token, so no count across ranks is needed. Its last program
  (an atomic ticket) tells all ranks how many tokens there are.
- `_receive_kernel` waits for all ranks and fills the buckets of this rank's experts; the products
  read the rows where they came. How many came is known on the device alone, so its last program
  says for which of two launches of a product, with tiles of few rows or of many, they are.
- `_return_kernel` sums the outputs of each token's experts on this rank and writes the sum into the
  memory of the token's rank; its last program tells all ranks.
- `_add_kernel` waits for all ranks and adds up, in the order of the ranks, the sums that they
  returned.

Each message has the epoch, the number of the exchange. One buffer for each suffices: a rank sends
exchange e + 1 after its `_add_kernel` of e, for which every rank has ended reading the received
rows; and it returns sums of e + 1 after the arrival of e + 1 from the rank that gets them, which
has read the sums of e by then. The outputs are the same for any order in which programs run.

No kernel waits for another program of its own launch, nor for a kernel that the other rank launches
behind one that waits for this rank: launches of ranks that make the same exchanges in the same
order always end, whatever else runs on the GPUs. A rank that leaves an exchange out stops all
others.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.symmetric_memory import SymmetricBuffer, is_last_program

_ALIGNMENT = 256
#: Programs of the kernel that returns sums: each takes row after row.
RETURNING_PROGRAMS = 528
#: Tokens of a step of a program that fills buckets, and such programs for each rank.
RECEIVED_TOKENS, RECEIVING_PROGRAMS = 64, 32
#: Above every number of pairs.
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Offsets into a rank's symmetric memory, in bytes; the same on every rank. First dimensions
    are the rank that sent, and the number of its token.

    Attributes:
        max_tokens: of a rank.
        sent, returned: int64 [ranks] each: an epoch in the upper half; `sent` has the number of
            tokens in the lower.
        places, weights: int32 and float32 [ranks, max_tokens, top_k]: of each pair of a token, its
            expert's place on this rank, or -1, and its weight.
        rows, sums: [ranks, max_tokens, hidden]: tokens that came, and sums that were returned for
            this rank's own tokens; the first dimension of `sums` is the rank that returned it.
        nbytes: size of the whole.
    """

    max_tokens: int
    sent: int
    returned: int
    places: int
    weights: int
    rows: int
    sums: int
    nbytes: int

    @classmethod
    def of(
        cls, size: int, max_tokens: int, top_k: int, hidden: int, dtype: torch.dtype
    ) -> ExchangeLayout:
        """Returns the layout for `size` ranks with up to `max_tokens` tokens each."""
        slots = size * max_tokens
        row = hidden * dtype.itemsize
        parts = [size * 8, size * 8, slots * top_k * 4, slots * top_k * 4, slots * row, slots * row]
        starts = [0]
        for nbytes in parts:
            starts.append(-(-(starts[-1] + nbytes) // _ALIGNMENT) * _ALIGNMENT)
        return cls(max_tokens, *starts)


@triton.jit
def _tell(addresses, at, epoch, number, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Writes (epoch, number) at this rank's word on all ranks; all earlier writes of programs of
    this launch are visible to a rank that reads it."""
    peer = tl.arange(0, triton.next_power_of_2(SIZE))
    words = (tl.load(addresses + peer, peer < SIZE, 0) + at + RANK * 8).to(
        tl.pointer_type(tl.int64)
    )
    word = (epoch.to(tl.int64) << 32) | number
    value = tl.zeros([triton.next_power_of_2(SIZE)], tl.int64) + word
    tl.atomic_xchg(words, value, peer < SIZE, sem="release", scope="sys")


@triton.jit
def _await(base, at, rank, epoch):
    """Waits for the word of a rank with an epoch; returns its number."""
    place = (base + at + rank * 8).to(tl.pointer_type(tl.int64))
    word = tl.atomic_add(place, 0, sem="acquire", scope="sys")
    while (word >> 32).to(tl.int32) != epoch:
        word = tl.atomic_add(place, 0, sem="acquire", scope="sys")
    return word.to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def _send_kernel(
    x, experts, weights, firsts, addresses, epochs, ticket, tokens, sent_at, places_at, weights_at,
    rows_at, max_tokens, RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """Sends the rows of tokens: a program for each token, and one if there is none. `firsts` int32
    [SIZE + 1] are the first places of the ranks, and the number of all."""
    token = tl.program_id(0)
    epoch = tl.load(epochs) + 1
    if token < tokens:
        column, j = tl.arange(0, BLOCK), tl.arange(0, K_PAD)
        mask, is_pair = column < WIDTH, j < TOP_K
        row = tl.load(x + token.to(tl.int64) * WIDTH + column, mask, 0.0)
        place = tl.load(experts + token * TOP_K + j, is_pair, -1)
        weight = tl.load(weights + token * TOP_K + j, is_pair, 0.0)
        slot = (RANK * max_tokens + token).to(tl.int64)
        for peer in tl.static_range(SIZE):
            base = tl.load(addresses + peer)
            first, end = tl.load(firsts + peer), tl.load(firsts + peer + 1)
            is_there = is_pair & (place >= first) & (place < end)
            place_out = (base + places_at).to(tl.pointer_type(tl.int32)) + slot * TOP_K
            tl.store(place_out + j, tl.where(is_there, place - first, -1), is_pair)
            weight_out = (base + weights_at).to(tl.pointer_type(tl.float32)) + slot * TOP_K
            tl.store(weight_out + j, weight, is_pair)
            if tl.max(is_there.to(tl.int32), 0) > 0:
                out = (base + rows_at).to(tl.pointer_type(x.dtype.element_ty)) + slot * WIDTH
                tl.store(tl.multiple_of(out, 16) + column, row, mask)
    if is_last_program(ticket):
        _tell(addresses, sent_at, epoch, tokens, RANK, SIZE)


@triton.jit(do_not_specialize=["max_few"])
def _receive_kernel(
    counts, few, many, buckets, addresses, epochs, ticket, sent_at, places_at, max_tokens, max_few,
    RANK: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr,
    K_PAD: tl.constexpr, PLACES: tl.constexpr, PLACES_PAD: tl.constexpr,
):  # fmt: skip
    """Puts the pairs of a rank's tokens into the buckets of their places: TOKENS of them at a time,
    and all programs of a rank all of them. `few` and `many` get the counts of all pairs, or zeros:
    `few` gets them if they are up to `max_few` in all, else `many`."""
    sender = tl.program_id(1)
    base = tl.load(addresses + RANK)
    tokens = _await(base, sent_at, sender, tl.load(epochs) + 1)
    j = tl.arange(0, K_PAD)[None, :]
    places = (base + places_at).to(tl.pointer_type(tl.int32))
    for begin in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        token = begin + tl.arange(0, TOKENS)
        pair = (sender * max_tokens + token)[:, None] * TOP_K + j
        mask = (token < tokens)[:, None] & (j < TOP_K)
        place = tl.load(places + pair, mask, -1)
        is_here = mask & (place >= 0)
        rank = tl.atomic_add(counts + place, 1, is_here, sem="relaxed")
        # after a step that failed between two launches, counters are too high
        is_here = is_here & (rank < SIZE * max_tokens)
        tl.store(buckets + place * (SIZE * max_tokens) + rank, pair, is_here)
    if is_last_program(ticket):
        number = tl.arange(0, PLACES_PAD)
        count = tl.load(counts + number, number < PLACES, 0, volatile=True)
        is_few = tl.sum(count, 0) <= max_few
        tl.store(few + number, tl.where(is_few, count, 0), number < PLACES)
        tl.store(many + number, tl.where(is_few, 0, count), number < PLACES)


@triton.jit
def _return_kernel(
    pairs, counts, addresses, epochs, ticket, sent_at, returned_at, places_at, sums_at, max_tokens,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, PLACES: tl.constexpr, PLACES_PAD: tl.constexpr,
):  # fmt: skip
    """Sums `pairs` [SIZE * max_tokens * TOP_K, WIDTH] over each token's pairs on this rank."""
    epoch, base = tl.load(epochs) + 1, tl.load(addresses + RANK)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    for sender in tl.static_range(SIZE):
        tokens = _await(base, sent_at, sender, epoch)
        out = (tl.load(addresses + sender) + sums_at).to(tl.pointer_type(pairs.dtype.element_ty))
        for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
            slot = (sender * max_tokens + token).to(tl.int64)
            total = tl.zeros([BLOCK], tl.float32)
            found = 0
            for j in tl.static_range(TOP_K):
                places = (base + places_at).to(tl.pointer_type(tl.int32))
                is_here = tl.load(places + slot * TOP_K + j) >= 0
                value = tl.load(pairs + (slot * TOP_K + j) * WIDTH + column, mask & is_here, 0.0)
                total += value.to(tl.float32)
                found += is_here.to(tl.int32)
            if found > 0:
                target = out + (RANK * max_tokens + token).to(tl.int64) * WIDTH
                total_out = total.to(out.dtype.element_ty)
                tl.store(tl.multiple_of(target, 16) + column, total_out, mask)
    if is_last_program(ticket):
        number = tl.arange(0, PLACES_PAD)
        tl.store(counts + number, tl.zeros([PLACES_PAD], tl.int32), number < PLACES)
        _tell(addresses, returned_at, epoch, 0, RANK, SIZE)


@triton.jit(do_not_specialize=["tokens"])
def _add_kernel(
    out, residual, added, experts, firsts, addresses, epochs, ticket, tokens, returned_at, sums_at,
    max_tokens, RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """Adds up the returned sums: a program for each of the rank's own tokens, and one if there is
    none."""
    token = tl.program_id(0)
    epoch, base = tl.load(epochs) + 1, tl.load(addresses + RANK)
    for peer in tl.static_range(SIZE):
        _await(base, returned_at, peer, epoch)
    tl.debug_barrier()
    if token < tokens:
        column, j = tl.arange(0, BLOCK), tl.arange(0, K_PAD)
        mask = column < WIDTH
        place = tl.load(experts + token * TOP_K + j, j < TOP_K, -1)
        row = token.to(tl.int64) * WIDTH
        total = tl.load(residual + row + column, mask, 0.0).to(tl.float32)
        if HAS_ADDED:
            total += tl.load(added + row + column, mask, 0.0).to(tl.float32)
        sums = (base + sums_at).to(tl.pointer_type(out.dtype.element_ty))
        for peer in tl.static_range(SIZE):
            first, end = tl.load(firsts + peer), tl.load(firsts + peer + 1)
            has = tl.max(((place >= first) & (place < end)).to(tl.int32), 0) > 0
            at = tl.multiple_of(sums + (peer * max_tokens + token).to(tl.int64) * WIDTH, 16)
            total += tl.load(at + column, mask & has, 0.0).to(tl.float32)
        tl.store(out + row + column, total.to(out.dtype.element_ty), mask)
    if is_last_program(ticket):
        tl.store(epochs, epoch)


def _row_of(hidden: int) -> dict[str, int]:
    """Returns the compile-time constants of a kernel whose programs take whole rows."""
    block = triton.next_power_of_2(hidden)
    return {"WIDTH": hidden, "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


@dataclass(frozen=True, slots=True)
class Arrived:
    """The tokens that this rank has received, as the products take them with `ExpertExchange.rows`
    as their x: once as `few` and once as `many`, of which one has all tokens and the other none.
    Only the device knows which.
    """

    few: RoutedTokens
    many: RoutedTokens


class ExpertExchange:
    """The all-to-all among the ranks of one model, for all its layers with experts, one after the
    other. Every rank takes part in each exchange, with or without tokens, in the same order, and on
    one stream.

    Attributes:
        rows: [ranks * max_tokens, hidden], the tokens that have come: the rows of the first
            product.
        top_k: experts of a token.
        max_pairs: rows of the products' results: ranks * max_tokens * top_k.
    """

    def __init__(
        self,
        peers: SymmetricBuffer,
        layout: ExchangeLayout,
        max_places: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
    ):
        """Takes symmetric memory of `layout`, zeroed on every rank.

        Args:
            max_places: the most places that this rank has in a layer.
            top_k, hidden, dtype: of the tokens.

        Raises:
            ValueError: the bytes of a token are no multiple of 16.
        """
        if hidden * dtype.itemsize % 16:
            raise ValueError(f"tokens of {hidden} numbers in {dtype} do not begin at 16 bytes each")
        self._peers, self._layout, self.top_k = peers, layout, top_k
        device, size = peers.local.device, peers.size
        slots = size * layout.max_tokens
        self.max_pairs = slots * top_k

        def view(start: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            nbytes = dtype.itemsize
            for length in shape:
                nbytes *= length
            return peers.local[start : start + nbytes].view(dtype).view(shape)

        self.rows = view(layout.rows, dtype, slots, hidden)
        self._places = view(layout.places, torch.int32, slots, top_k)
        self._weights = view(layout.weights, torch.float32, slots, top_k)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._tickets = torch.zeros(4, dtype=torch.int32, device=device)
        self._counts, self._few, self._many = (
            torch.zeros(max_places, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._buckets = torch.zeros(max_places, slots, dtype=torch.int32, device=device)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._peers.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._peers.size

    def first_places(self, by_rank: Sequence[int]) -> torch.Tensor:
        """Returns the first place of each rank, and the number of all, int32 [ranks + 1], of a
        layer in which the ranks have so many places each."""
        starts = [sum(by_rank[:rank]) for rank in range(self.size + 1)]
        return torch.tensor(starts, dtype=torch.int32, device=self.rows.device)

    def send(
        self,
        x: torch.Tensor,
        routed: RoutedTokens,
        firsts: torch.Tensor,
        num_places: int,
        max_few: int = NO_LIMIT,
    ) -> Arrived:
        """Sends tokens to the ranks of their experts. Returns the tokens that this rank has
        received.

        Args:
            x: [T, hidden], contiguous, T of 0 to `max_tokens`.
            routed: of these tokens; `experts` are places of all ranks.
            firsts: from `first_places`.
            num_places: how many this rank has.
            max_few: up to so many pairs of tokens and places here are `few`.

        Raises:
            ValueError: the shapes do not fit.
        """
        layout, peers, top_k = self._layout, self._peers, self.top_k
        tokens, hidden = x.shape
        if hidden != self.rows.shape[1] or not x.is_contiguous() or tokens > layout.max_tokens:
            raise ValueError(f"x must be contiguous, up to {layout.max_tokens} tokens: {x.shape}")
        if routed.experts.shape != (tokens, top_k):
            raise ValueError(f"{top_k} experts a token, not {routed.experts.shape}")
        if num_places > len(self._buckets):
            raise ValueError(f"{num_places} places, and there are buckets for fewer")
        ranks = {"RANK": peers.rank, "SIZE": peers.size}
        pairs = {"TOP_K": top_k, "K_PAD": triton.next_power_of_2(top_k)}
        _send_kernel[(max(1, tokens),)](
            x, routed.experts, routed.weights, firsts, peers.addresses, self._epoch,
            self._tickets, tokens, layout.sent, layout.places, layout.weights, layout.rows,
            layout.max_tokens, **ranks, **pairs, **_row_of(hidden),
        )  # fmt: skip
        programs = min(triton.cdiv(layout.max_tokens, RECEIVED_TOKENS), RECEIVING_PROGRAMS)
        _receive_kernel[(programs, peers.size)](
            self._counts, self._few, self._many, self._buckets, peers.addresses, self._epoch,
            self._tickets[1:], layout.sent, layout.places, layout.max_tokens, max_few,
            TOKENS=RECEIVED_TOKENS, PLACES=num_places,
            PLACES_PAD=triton.next_power_of_2(num_places), **ranks, **pairs,
        )  # fmt: skip
        buckets = self._buckets[:num_places]
        return Arrived(
            *(
                RoutedTokens(self._weights, self._places, counts[:num_places], buckets)
                for counts in (self._few, self._many)
            )
        )

    def combine(
        self,
        pairs: torch.Tensor,
        routed: RoutedTokens,
        firsts: torch.Tensor,
        num_places: int,
        residual: torch.Tensor,
        out: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the outputs to the tokens' ranks, and adds the outputs that come back to
        `residual`.

        Args:
            pairs: [max_pairs, hidden]: the second product of the tokens that `send` returned.
            routed: of this rank's own tokens.
            firsts, num_places: as for `send`.
            residual: [T, hidden], contiguous.
            out: [T, hidden] to write to, contiguous; may be `residual`.
            added: [T, hidden], added as well if given; contiguous.
        """
        layout, peers, top_k = self._layout, self._peers, self.top_k
        tokens, hidden = out.shape
        ranks = {"RANK": peers.rank, "SIZE": peers.size}
        row = {"TOP_K": top_k, **_row_of(hidden)}
        programs = min(RETURNING_PROGRAMS, layout.max_tokens)
        _return_kernel[(programs,)](
            pairs, self._counts, peers.addresses, self._epoch, self._tickets[2:], layout.sent,
            layout.returned, layout.places, layout.sums, layout.max_tokens, PLACES=num_places,
            PLACES_PAD=triton.next_power_of_2(num_places), **ranks, **row,
        )  # fmt: skip
        _add_kernel[(max(1, tokens),)](
            out, residual, residual if added is None else added, routed.experts, firsts,
            peers.addresses, self._epoch, self._tickets[3:], tokens, layout.returned, layout.sums,
            layout.max_tokens, K_PAD=triton.next_power_of_2(top_k), HAS_ADDED=added is not None,
            **ranks, **row,
        )  # fmt: skip
        return out
