"""Products with adapters: tokens sorted by adapter, and sums of the products of each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from adapter_cases import make_case
from aioinfer.kernels.adapter_slots import ProductRows, SlotRows, enter_slot
from aioinfer.kernels.adapter_tiles import (
    BLOCK,
    MAX_FUSED_ROWS,
    MISSING,
    AdapterTiles,
    RankLayout,
    assign_adapters,
    max_tiles,
    sort_by_adapter,
    tile_size,
)
from aioinfer.kernels.adapters import RowOperand, _ShrinkPlan, expand, shrink
from aioinfer.kernels.few_rows_dense import few_rows_dense
from aioinfer.kernels.gated_product import interleave

from aioinfer.config_sections import LoraConfig
from aioinfer.features.adapters.layers.addition import CUBLAS, EXPAND
from aioinfer.features.adapters.layers.parts import AdapterWeights
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.kernel_choices import Candidate, KernelChoices
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.step import Step, StepInputs
from aioinfer.worker.graph_bodies import EXTENDED_TOKENS
from aioinfer.worker.step_graphs import mixed_sizes
from tests.adapter_files import pack_adapter

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "num_slots"), [(1, 1), (5, 3), (70, 5), (600, 2), (300, 20), (1100, 3)]
)
def test_tokens_are_sorted_by_adapter(tokens: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    adapters = torch.randint(-1, num_slots, (tokens,), generator=generator, dtype=torch.int32)
    tiles = AdapterTiles.empty(2 * tokens, RankLayout(num_slots, 16, (1,)), torch.float32, CPU)
    tiles.order.fill_(77)
    tiles.slots.fill_(77)
    views = tiles.views(tokens)
    sort_by_adapter(adapters, tiles, torch.full((num_slots,), 16, dtype=torch.int32))
    order, of_tiles = views.order.view(-1, tile_size(tokens)), views.slots
    assert len(of_tiles) == max_tiles(tokens, num_slots)
    placed = order[order >= 0].tolist()
    assert sorted(placed) == torch.nonzero(adapters >= 0)[:, 0].tolist()
    for slot, tile in zip(of_tiles.tolist(), order.tolist(), strict=True):
        assert all(adapters[token] == slot for token in tile if token >= 0)
        assert slot >= 0 or set(tile) == {-1}
    assert (tiles.order[len(views.order) :] == 77).all()
    assert (tiles.slots[len(views.slots) :] == -1).all()


@pytest.mark.parametrize("max_tokens", [40, 200, 300, 1000, 1100, 4608])
def test_a_step_has_the_tiles_of_its_graph(max_tokens: int) -> None:
    """A step is sorted by its own number of tokens, and its graph is that of the next size."""
    sizes = mixed_sizes(max_tokens)
    for tokens in range(1, max_tokens + 1):
        captured = next(size for size in sizes if size >= tokens)
        assert tile_size(tokens) == tile_size(captured)
        assert (tokens <= MAX_FUSED_ROWS) == (captured <= MAX_FUSED_ROWS)


def test_the_warm_up_has_each_way_to_divide_the_work() -> None:
    """Of the sizes that it launches, and of the largest step."""

    def way_of(tokens: int) -> tuple[object, ...]:
        plan = _ShrinkPlan.of(tokens, 48, 4096, 2, 64)
        return plan.tile, plan.ranks, plan.inputs, plan.splits, plan.stages

    launched = {way_of(size) for size in (1, *mixed_sizes(EXTENDED_TOKENS), 8192)}
    assert {way_of(tokens) for tokens in range(1, 8193)} <= launched


@pytest.mark.parametrize(("num_slots", "max_rank"), [(9, 16), (5, 24), (3, 160)])
def test_blocks_of_ranks_are_those_of_the_adapters(num_slots: int, max_rank: int) -> None:
    layout = RankLayout(num_slots, max_rank, (1, 3))
    ranks = torch.tensor([max_rank - number for number in range(num_slots)], dtype=torch.int32)
    tiles = AdapterTiles.empty(16, layout, torch.float32, CPU)
    tiles.shrunk.fill_(7.0)
    tiles.words.fill_(7)
    for used in ([], [0], [num_slots - 1, 1], list(range(num_slots))):
        adapters = torch.tensor([*used, -1], dtype=torch.int32)
        sort_by_adapter(adapters, tiles, ranks)
        assert not tiles.shrunk[: len(adapters)].any()
        assert (tiles.words == MISSING).all()
        for modules in layout.modules:
            expected = set()
            for slot in used:
                first = slot * modules * max_rank
                columns = range(first, first + modules * int(ranks[slot]))
                expected |= {column // BLOCK for column in columns}
            count, *blocks = tiles.blocks_of(modules).tolist()
            assert blocks[:count] == sorted(expected)


def test_tokens_have_the_adapters_of_their_slots() -> None:
    query_starts = torch.tensor([0, 1, 1, 71, 73], dtype=torch.int32)
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    of_slots = torch.tensor([9, 0, 2, 1], dtype=torch.int32)
    adapters = torch.full((80,), 77, dtype=torch.int32)
    assign_adapters(slots, query_starts, of_slots, adapters)
    assert adapters.tolist() == [0, *[1] * 70, -1, -1, *[-1] * 7]


@pytest.mark.parametrize(
    ("tokens", "width", "out", "rank", "modules"),
    [
        (1, 40, 24, 16, 1), (7, 196, 130, 16, 3), (40, 300, 40, 8, 2), (90, 64, 200, 24, 1),
        (258, 40, 24, 24, 1), (1030, 32, 20, 8, 2), (9, 32, 20, 2, 1), (3, 24, 20, 256, 1),
    ],
)  # fmt: skip
def test_each_token_gets_the_product_of_its_adapter(
    tokens: int, width: int, out: int, rank: int, modules: int
) -> None:
    case = make_case(tokens, width, out, rank, modules, device=CPU)
    y = torch.randn(tokens, out)
    expected = y + case.added(case.x)
    shrink(case.x, case.adapters, case.tiles, case.workspace)
    expand(y, case.adapters, case.tiles, case.workspace)
    assert not case.workspace.tickets.any()
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "rank", "modules"), [(1, 16, 2), (1, 40, 2), (9, 16, 2)])
def test_products_of_few_rows_add_adapters(
    tokens: int, rank: int, modules: int, gated: bool
) -> None:
    """Also of one row that is normed before, whose launch computes x A^T as well."""
    width, out = 96, 32
    case = make_case(tokens, width, out, rank, modules, device=CPU)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(out, width, generator=generator)
    norm = torch.rand(width, generator=generator) if tokens == 1 else None
    x = given = case.x
    if norm is not None:
        given = F.rms_norm(x, [width], norm, 1e-6)
    expected = given @ weight.t() + case.added(given)
    options = {"norm_weight": norm, "eps": 1e-6, "gated": gated}
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = F.silu(gate) * up
        weight = interleave(weight)
        case.adapters.up.copy_(interleave(case.adapters.up))
    for number in range(3):  # one launch empties what the next one waits for
        if tokens == 1:
            operand = RowOperand.of(case.adapters, case.tiles, number)
        else:
            operand = shrink(x, case.adapters, case.tiles, case.workspace)
        found = few_rows_dense(x, weight, **options, operand=operand)
        if isinstance(operand, RowOperand):
            assert (operand.others[: case.adapters.width] == MISSING).all()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("candidate", [EXPAND, CUBLAS])
@pytest.mark.parametrize("tokens", [20, 40])
def test_sums_behind_products_are_the_same_by_each_candidate(
    candidate: Candidate, tokens: int
) -> None:
    """Of a step's tokens; and, as they are timed, of rows of all adapters in equal parts."""
    generator, choices = torch.Generator().manual_seed(1), KernelChoices()
    slots = AdapterSlots(
        LoraConfig(max_adapters=3, max_rank=4),
        Backend(CPU, torch.float32, ParallelGroup(0, 1), has_kernels=True, choices=choices),
    )
    product = slots.extend([Source(name, Shard.whole(12)) for name in "ab"], Shard.whole(24))
    slots.allocate(tokens, tokens)
    added = torch.zeros(3, 24, 24)
    for slot, rank in enumerate((4, 1, 3)):
        weights = {
            name: AdapterWeights(
                torch.randn(rank, 24, generator=generator),
                torch.randn(12, rank, generator=generator), 0.5,
            )
            for name in "ab"
        }  # fmt: skip
        slots.enter(slot, pack_adapter(slots, weights), rank)
        added[slot] = torch.cat([0.5 * each.up @ each.down for each in weights.values()])
    of_tokens = torch.randint(-1, 3, (tokens,), dtype=torch.int32, generator=generator)
    slots.of_slots.copy_(of_tokens + 1)
    rows, starts = (torch.arange(n, dtype=torch.int32) for n in (tokens, tokens + 1))
    x, y = (torch.randn(tokens, 24, generator=generator) for _ in range(2))
    expected = y.clone()
    for slot in range(3):
        expected[of_tokens == slot] += x[of_tokens == slot] @ added[slot].t()

    def add(to: torch.Tensor) -> None:
        with slots:
            slots.plan(Step(StepInputs(rows, rows, starts, rows, (), slots=rows), None))
            product.begin(x)
            product.add(x, to)

    add(y.clone())  # registers the product
    (chosen,) = choices.products.values()
    assert product._addition is not None
    assert product._addition.candidates("residual", tokens) == [EXPAND, CUBLAS]
    chosen.choose({tokens: candidate})
    add(y)
    torch.testing.assert_close(y, expected)
    shrunk = slots._tiles.shrunk_of(2)[:tokens]
    shrunk.zero_()
    columns = product.width
    for row in range(tokens):
        slot = next(s for s in range(3) if row < (s + 1) * tokens // 3)
        shrunk[row, slot * columns : (slot + 1) * columns] = 1.0
    total = torch.zeros(tokens, 24)
    chosen.forced = candidate
    product._addition.multiply(shrunk, Epilogue(add_to=total))
    torch.testing.assert_close(total, shrunk @ product._up.t())


@pytest.mark.parametrize("widest", [48, 700])
def test_the_matrices_of_all_products_enter_a_slot(widest: int) -> None:
    generator, slots = torch.Generator().manual_seed(0), 3
    shapes = [(70, 16, True), (257, widest, False), (5, 8, True)]  # out, width, whether in an order
    ups = torch.randn(7 + sum(out * (slots * width + 3) for out, width, _ in shapes))[7:]
    packed, products, start, end = torch.randn(20_000 + 257 * widest), [], 0, 0
    for out, width, has_order in shapes:
        columns = slots * width + 3
        up, end = ups[end : end + out * columns].view(out, columns), end + out * columns
        order = torch.randperm(out, generator=generator) if has_order else None
        products.append(ProductRows(start, width, up, order))
        start += 1000 + out * width
    before = [product.up.clone() for product in products]
    enter_slot(packed, SlotRows.of(products, ups), 1)
    for product, expected in zip(products, before, strict=True):
        given = packed[product.start :][: len(expected) * product.width].view(len(expected), -1)
        own = given if product.order is None else given[product.order]
        expected[:, product.width : 2 * product.width] = own
        assert torch.equal(product.up, expected)
