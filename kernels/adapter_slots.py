"""The matrices B of an adapter go to their slot: those of all products in one launch, since a
launch for each takes longer on the host than the copy does on the GPU."""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Numbers that a program copies at most, but a row at least.
_NUMBERS = 4096
#: What `SlotRows.blocks` has for a block.
_FIELDS = 7


@dataclass(frozen=True, slots=True)
class ProductRows:
    """Where B of one product is.

    Attributes:
        start: of B [out, width] in the numbers B of a packed adapter.
        width: columns of a slot.
        up: [out, columns], of all slots, whose columns lie side by side; a part of `SlotRows.ups`.
        order: int64 [out], the row of the packed B at each place; None for the same order.
    """

    start: int
    width: int
    up: torch.Tensor
    order: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Where the matrices B of all products are.

    Attributes:
        ups: of all products and slots, one after the other.
        blocks: int64 [blocks, 7], for each block of rows of a product: where B begins in the packed
            adapter and in `ups`, the first row, the number of the product's rows, the columns of a
            slot and of all, and where the order begins in `orders`, -1 for none.
        orders: int64, of all products that have one.
        rows: of a block.
        width: columns of a slot, of the product with the most; the next power of two.
    """

    ups: torch.Tensor
    blocks: torch.Tensor
    orders: torch.Tensor
    rows: int
    width: int

    @classmethod
    def of(cls, products: Sequence[ProductRows], ups: torch.Tensor) -> SlotRows:
        """Returns where the products are, in memory of `ups`."""
        width = max(triton.next_power_of_2(product.width) for product in products)
        rows = max(1, _NUMBERS // width)
        blocks: list[list[int]] = []
        orders = [torch.zeros(1, dtype=torch.int64, device=ups.device)]
        num_orders = 1
        for product in products:
            (out, columns), order = product.up.shape, -1
            if product.order is not None:
                order, num_orders = num_orders, num_orders + out
                orders.append(product.order.to(ups.device))
            target = product.up.storage_offset() - ups.storage_offset()
            blocks += [
                [product.start, target, first, out, product.width, columns, order]
                for first in range(0, out, rows)
            ]
        table = torch.tensor(blocks, dtype=torch.int64).to(ups.device)
        return cls(ups, table, torch.cat(orders), rows, width)


@triton.jit(do_not_specialize=["slot"])
def _enter_kernel(
    packed, ups, blocks, orders, slot,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(0).to(tl.int64) * FIELDS
    source, target = tl.load(block), tl.load(block + 1)
    row = tl.load(block + 2) + tl.arange(0, ROWS)
    width, columns = tl.load(block + 4), tl.load(block + 5)
    is_row = row < tl.load(block + 3)
    order, given = tl.load(block + 6), row
    if order >= 0:
        given = tl.load(orders + order + row, is_row, 0)
    column = tl.arange(0, WIDTH)
    here = is_row[:, None] & (column < width)[None, :]
    value = tl.load(packed + source + given[:, None] * width + column[None, :], here, 0.0)
    place = ups + target + row[:, None] * columns + slot * width
    tl.store(place + column[None, :], value, here)


def enter_slot(packed: torch.Tensor, rows: SlotRows, slot: int) -> None:
    """Copies the matrices B of an adapter to its slot.

    Args:
        packed: the numbers B of the adapter, of the dtype of `rows.ups`.
        rows: where they go.
        slot: the number of the slot.
    """
    _enter_kernel[(len(rows.blocks),)](
        packed, rows.ups, rows.blocks, rows.orders, slot,
        FIELDS=_FIELDS, ROWS=rows.rows, WIDTH=rows.width, num_warps=4,
    )  # fmt: skip
