"""Which variants of its kernels a server needs: those of random steps are among those of the
warm-up, so that none is compiled while it serves.

Triton compiles a kernel anew for each combination of constants, dtypes, pointers and integers that
16 divides, and integers that are 1. In its interpreter nothing is compiled: the combinations are
those that it would distinguish for a Hopper GPU. What depends on the GPU itself, as the choice of
a product's kernel does, is not seen here; `tests/gpu/test_compilation.py` runs on one. There a
kernel that the warm-up lacks is only found by the first server of a process that needs it: the next
one has it in memory.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_gpu_device import Graphs, ids, no_cuda  # noqa: F401  (a fixture of all tests)
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction

from aioinfer.config import Config, ModelConfig, SchedulerConfig, SpeculationConfig
from aioinfer.features.logprobs.sections import LogprobRows
from aioinfer.ipc.kv_spec import group_layers
from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.layers.formats.kernel_dense import KernelDenseWeight
from aioinfer.models.drafters.registry import build_drafter
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.features import Rank
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from aioinfer.worker.warm_up import run_kinds
from tests.automata import pack
from tests.kernels.bound_model import BLOCK_SIZE, CPU, Bound
from tests.kernels.test_family_kernels import FAMILIES, SIZES
from tests.tiny_models import tiny_model

MAX_LEN, BLOCKS, MAX_TOKENS, MAX_LOOKAHEAD = 48, 3, 80, 5
HOPPER = type(make_backend(GPUTarget("cuda", 90, 32)))
FIELDS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5}, {"logit_bias": {4: 2.0}}, {"min_tokens": 3},
]  # fmt: skip


def variant_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Returns a text by which Triton would tell the launches of a kernel apart."""
    signature = inspect.signature(kernel.fn)
    named = {name: value for name, value in options.items() if name in signature.parameters}
    bound = signature.bind(*arguments, **named)
    bound.apply_defaults()
    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    found = [kernel.fn.__name__, *(f"{key}={options[key]}" for key in options if key not in named)]
    for name, value in bound.arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation):
            found.append(f"{name}={value}")
        else:
            may = name not in unspecialized, name not in unaligned
            found.append(f"{name}: {native_specialize_impl(HOPPER, value, False, *may)}")
    return "\n    ".join(found)


@contextmanager
def recording() -> Iterator[set[str]]:
    """Yields the variants of the kernels that are launched in the context."""
    found, run = set[str](), InterpretedFunction.run

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(variant_of(self, arguments, options))
        run(self, *arguments, grid=grid, warmup=warmup, **options)

    with patch.object(InterpretedFunction, "run", note):
        yield found


def loaded_drafter(config: Config, model: Any) -> Any:
    """Returns the draft model that a configuration names, if it names one."""
    built = build_drafter(config, model, MAX_LEN)
    if built is None:
        return None
    drafter, folder = built
    drafter.load(folder, "auto", 0, lambda done, total: None)
    return drafter


class Server:
    """A runner of so many slots, each of which has its own KV blocks, and random requests; with
    adapters, those of random steps have some; with the folder of a draft model, it may draft tokens
    behind each step."""

    def __init__(
        self, folder: Path, num_slots: int, vocab_size: int, num_adapters: int = 0,
        drafts: Path | None = None,
    ):  # fmt: skip
        self.num_slots, self.vocab_size = num_slots, vocab_size
        bound = Bound(folder, kernels=True, num_adapters=num_adapters)
        self._backend, model = bound.backend, bound.model
        if num_adapters:
            bound.fill_adapters()
        speculation = SpeculationConfig(max_draft_tokens=2)
        if drafts is not None:
            speculation = replace(speculation, method="draft", model=str(drafts))
        config = Config(
            model=ModelConfig(path=str(folder)), speculation=speculation,
            scheduler=SchedulerConfig(max_num_seqs=num_slots),
        )  # fmt: skip
        self._drafter = loaded_drafter(config, model)
        groups = group_layers(
            [*model.kv_specs, *(self._drafter.kv_specs if self._drafter is not None else [])]
        )
        self._num_groups, keeps_states = len(groups), any(group.keeps_states for group in groups)
        self._looks_ahead = not keeps_states or model.looks_ahead(BLOCK_SIZE)
        replays = keeps_states and self._looks_ahead
        if replays:
            self._backend.saved_rows = num_slots, MAX_LOOKAHEAD
        num_blocks = [BLOCKS * num_slots] * len(groups)
        kv = KVTensors(groups, num_blocks, BLOCK_SIZE, torch.float32, CPU)
        slots = Slots(
            num_slots, MAX_LEN, BLOCK_SIZE, vocab_size, CPU, len(groups), uses_kernels=True,
            has_rotary_offsets=model.has_rotary_sections, has_state_lens=replays,
        )  # fmt: skip
        rows = num_slots + MAX_LOOKAHEAD
        of_model, of_drafter = kv.divided(len(model.layer_numbers))
        model.bind(*of_model, BLOCK_SIZE, rows, MAX_TOKENS, programs=3)
        if self._drafter is not None:
            self._drafter._model.bind(*of_drafter, BLOCK_SIZE, rows, MAX_TOKENS, programs=3)
        works = StepWorks.load(Rank(model, slots, None, config, self._drafter))
        device = GpuDevice(
            model, kv, slots, MAX_TOKENS, max_lookahead=MAX_LOOKAHEAD,
            has_drafter=self._drafter is not None,
        )  # fmt: skip
        self.runner = ModelRunner(model, device, works)
        self.bodies = GraphBodies(self.runner, device)
        device.graphs.decode = Graphs(self.bodies.launch_decode)  # type: ignore[assignment]
        ahead = Graphs(self.bodies.launch_lookahead_decode)
        device.graphs.lookahead = ahead  # type: ignore[assignment]
        extended = Graphs(self.bodies.launch_decode)
        device.graphs.extended = extended  # type: ignore[assignment]
        self._lengths: dict[int, int] = {}  # of the running requests, by slot
        self._random = random.Random(num_slots)

    def warm_up(self) -> None:
        """Does what `GpuWarmUp.compile` does."""
        blocks = BLOCKS * self.num_slots
        steps = DummySteps(
            self.runner, self._num_groups, BLOCK_SIZE, self.vocab_size, blocks, MAX_TOKENS
        )
        longest = min(MAX_LEN - 8, MAX_TOKENS // self.num_slots)
        largest, model = steps.largest_plan([longest] * self.num_slots), self.runner.model
        for run in (
            lambda: steps.run(largest), self.runner.slots.reset, self.bodies.begin_warm_up,
            steps.run_all, model.backend.choices.warm_up, model.warm_up,
            *([self._drafter.warm_up] if self._drafter is not None else []), self.bodies.warm_up,
        ):  # fmt: skip
            run_kinds(self._backend, run)
        self.runner.slots.reset()

    def step(self) -> None:
        """Computes a random step; see `_step`."""
        extension = self._backend.extension
        if extension is None or self._random.random() < 0.5:
            self._step()
        else:
            with extension:
                self._step()

    def _step(self) -> None:
        """Computes a random step: decodes of some requests and prompts of new ones, or decodes of
        some with a draft each, which end then."""
        rng, lengths = self._random, self._lengths
        for slot in [slot for slot in lengths if lengths[slot] > MAX_LEN - 4 or rng.random() < 0.1]:
            del lengths[slot]
        decoding = rng.sample(list(lengths), rng.randint(min(1, len(lengths)), len(lengths)))
        if self._looks_ahead and decoding and rng.random() < 0.4:
            self._look_ahead(decoding[:MAX_LOOKAHEAD])
            return
        free = [slot for slot in range(self.num_slots) if slot not in lengths]
        room = (MAX_TOKENS - len(decoding)) // self.num_slots
        admitted = [
            self._admission(slot, min(room, rng.choice([1, 2, 3, 8, 16, 17])))
            for slot in free[: rng.randint(0, len(free)) or 1]
        ]
        new = [each.slot for each in admitted]
        starts = [lengths[slot] for slot in decoding] + [0] * len(new)
        counts = [1] * len(decoding) + [len(each.tokens) for each in admitted]
        for slot, start, count in zip([*decoding, *new], starts, counts, strict=True):
            lengths[slot] = start + count
        sections: list[Section] = [Admissions.of(admitted)] if admitted else []
        self._run([*decoding, *new], starts, counts, new, sections)

    def _look_ahead(self, decoding: list[int]) -> None:
        starts = [
            start for slot in decoding for start in (self._lengths[slot], self._lengths[slot] + 1)
        ]
        for slot in decoding:
            del self._lengths[slot]
        offsets = np.tile(ids(0, 1), len(decoding))
        rows = LookaheadRows(offsets, np.ones_like(offsets), np.full_like(offsets, MAX_LEN))
        slots = [slot for slot in decoding for _ in range(2)]
        self._run(slots, starts, [1] * len(slots), [], [rows])

    def _run(
        self, slots: list[int], starts: list[int], counts: list[int], new: list[int],
        sections: list[Section],
    ) -> None:  # fmt: skip
        """Computes a step with features; `new`: the slots that get KV blocks."""
        none, blocks = ids(), np.arange(BLOCKS, dtype=np.int32)
        tables = [none] * 3
        if new:
            of_slots, count = np.repeat(ids(*new), BLOCKS), self._num_groups
            first_lines = np.arange(count, dtype=np.int32)[:, None] * self.num_slots
            indices = np.tile(blocks, len(new))
            tables = [
                (first_lines + of_slots).reshape(-1),
                *(np.tile(each, count) for each in (indices, BLOCKS * of_slots + indices)),
            ]
        sections += self._features(len(slots))
        ones = np.ones(len(slots), np.int32)
        looks_ahead = any(isinstance(section, LookaheadRows) for section in sections)
        if self._drafter is not None and not looks_ahead and self._random.random() < 0.5:
            # no drafts to check, but the drafter follows the step
            sections.append(LookaheadRows(0 * ones, ones, MAX_LEN * ones))
        plan = StepPlan(
            0, ids(*slots), ids(*starts), ids(*counts), ones, *tables, none, none, sections
        )
        self.runner.step(plan, self._all_bits).wait()

    def _admission(self, slot: int, length: int) -> Admission:
        rng = self._random
        fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.8])}
        for more in rng.sample(FIELDS, rng.randint(0, 4)):
            fields |= more
        params = SamplingParams(**fields)
        tokens = ids(*(rng.randrange(3, self.vocab_size) for _ in range(length)))
        return Admission(slot, tokens, length, params, slot, (2,) if params.min_tokens else ())

    def _features(self, rows: int) -> list[Section]:
        """Returns sections of some of the rows, or none."""
        rng, found = self._random, list[Section]()

        def some() -> I32:
            return ids(*sorted(rng.sample(range(rows), rng.randint(1, rows))))

        if rng.random() < 0.4:
            at = some()
            top = ids(*(rng.choice([0, 1, 5, 20]) for _ in at))
            found.append(LogprobRows(at, top, np.zeros_like(at), ids()))
        if rng.random() < 0.2:
            found.append(ConstrainedRows(some()))
        return found

    def _all_bits(self, plan: StepPlan, count: int) -> I32:
        return np.stack([pack(np.ones(self.vocab_size, np.bool_))] * count)


def check_warm_up(server: Server, steps: int) -> None:
    with recording() as warm:
        server.warm_up()
    with recording() as served:
        for _ in range(steps):
            server.step()
    assert len(served) > 15
    assert not served - warm, "\n".join(sorted(served - warm))


@pytest.mark.parametrize(
    ("num_slots", "vocab_size", "steps", "num_adapters", "drafts"),
    [(1, 100, 36, 0, False), (6, 96, 25, 0, False), (4, 96, 18, 2, False), (3, 97, 25, 0, True)],
)
def test_the_warm_up_has_all_variants(
    num_slots: int, vocab_size: int, steps: int, num_adapters: int, drafts: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(KernelDenseWeight, "_programs", 3)  # of a GPU
    tiny_model(
        "llama", tmp_path, vocab_size=vocab_size, hidden_size=128, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    small = None
    if drafts:
        small = tiny_model(
            "llama", tmp_path / "small", vocab_size=vocab_size - 8, hidden_size=64, head_dim=64,
            num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
        )  # fmt: skip
    check_warm_up(Server(tmp_path, num_slots, vocab_size, num_adapters, small), steps)


@pytest.mark.extended
@pytest.mark.parametrize("num_slots", [3, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_warm_up_has_all_variants_of_a_family(
    name: str, num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelDenseWeight, "_programs", 3)  # of a GPU
    family, fields = FAMILIES[name]
    fields = {**SIZES, "num_key_value_heads": 1, **fields}
    tiny_model(family, tmp_path, **fields)
    check_warm_up(Server(tmp_path, num_slots, fields["vocab_size"]), 14)
