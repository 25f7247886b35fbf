"""Steps with pictures on a GPU, in Triton's interpreter: the runner samples what the runner on a
CPU does, which tests of whole models compare with transformers."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from aioinfer.config import Config, MediaConfig, ModelConfig
from aioinfer.features.pictures.planning import PictureUse, Planning
from aioinfer.features.pictures.prompt import PromptPictures, place_pictures
from aioinfer.features.pictures.sections import PictureRows
from aioinfer.ipc.plan import Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.models.vision.registry import read_vision
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.steps import Row
from aioinfer.worker.device import CpuDevice, Device
from aioinfer.worker.features import Rank
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from tests.kernels.bound_model import BLOCK_SIZE, CPU, Bound
from tests.kernels.test_gpu_device import Graphs
from tests.kernels.test_gpu_device import no_cuda as no_cuda
from tests.vision_models import IMAGE, VOCAB, picture, save_model

MEDIA = MediaConfig()
PARAMS = SamplingParams(temperature=0)
MAX_LEN, BLOCKS = 64, 4


def make_runner(folder: Path, *, kernels: bool) -> ModelRunner:
    bound = Bound(folder, kernels=kernels, media=MEDIA)
    groups = bound.groups
    kv = KVTensors(groups, [2 * BLOCKS] * len(groups), BLOCK_SIZE, torch.float32, CPU)
    slots = Slots(
        2, MAX_LEN, BLOCK_SIZE, VOCAB, CPU, len(groups), uses_kernels=kernels,
        has_rotary_offsets=bound.model.has_rotary_sections,
    )  # fmt: skip
    programs = {"programs": 3} if kernels else {}
    bound.model.bind(groups, kv.tensors, BLOCK_SIZE, 2, 80, **programs)
    config = Config(model=ModelConfig(path=""), media=MEDIA)
    works = StepWorks.load(Rank(bound.model, slots, config=config))
    device: Device = GpuDevice(bound.model, kv, slots, 80) if kernels else CpuDevice(slots, kv)
    return ModelRunner(bound.model, device, works)


def prompt_of(folder: Path) -> tuple[list[int], PromptPictures]:
    """A prompt of some text, a picture and some text."""
    vision = read_vision(folder, ModelConfig(path=""), MEDIA)
    assert vision is not None
    processed = vision.format.process(picture(72, 60, 1))
    return place_pictures([5, 6, 7, IMAGE, 8, 9, 10], [processed], vision.format)


class Host:
    """What planning has of its engine."""

    config = Config(model=ModelConfig(path=""), media=MEDIA)


def plans(ids: list[int], pictures: PromptPictures, groups: int) -> list[StepPlan]:
    """A prompt beside another, in two chunks unless pictures are computed whole, then decodes."""
    planning, other = Planning(Host()), [3, 1, 4, 1, 5]
    request = Request("one", array("i", ids), len(ids), PARAMS, MAX_LEN)
    request.slot = 1
    admissions = Admissions.of(
        Admission(slot, np.array(text, np.int32), len(text), PARAMS, 0, rotary_offset=offset)
        for slot, text, offset in ((0, other, 0), (1, ids, pictures.rotary_offset))
    )
    cut = pictures.end if pictures.is_bidirectional else 6
    rows = [  # of a plan: slots, starts, lengths, samples
        ([0, 1], [0, 0], [5, cut], [1, 0]), ([0, 1], [5, cut], [1, len(ids) - cut], [1, 1]),
        *(([0, 1], [6 + step, len(ids) + step], [1, 1], [1, 1]) for step in range(2)),
    ]  # fmt: skip
    found = []
    for number, columns in enumerate(rows):
        slots, starts, lengths, samples = (np.array(each, np.int32) for each in columns)
        sections: list[Section] = [] if number else [admissions]
        end = int(starts[1] + lengths[1])
        use = PictureUse(pictures)
        if use.covers(int(starts[1]), end, True):
            sections.append(planning.plan([Row(request, use, int(starts[1]), end, -1)]))
        none = np.empty(0, np.int32)
        growth = [none, none, none]
        if not number:
            tables = [
                (group * 2 + slot, index, slot * BLOCKS + index)
                for group in range(groups)
                for slot in range(2)
                for index in range(BLOCKS)
            ]
            growth = list(np.ascontiguousarray(np.array(tables, np.int32).T))
        found.append(
            StepPlan(number, slots, starts, lengths, samples, *growth, none, none, sections)
        )
    return found


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "gemma4"])
def test_kernels_sample_what_torch_does(name: str, tmp_path: Path) -> None:
    is_captured = name == "qwen3_vl"  # attention both ways within a picture is not
    save_model(name, tmp_path, head_dim=64 if is_captured else 16)
    if name == "gemma4":  # pictures of few tokens, as transformers' processor does not make them
        (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 14}', "utf-8")
    ids, pictures = prompt_of(tmp_path)
    of_gpu, of_cpu = (make_runner(tmp_path, kernels=kernels) for kernels in (True, False))
    assert isinstance(of_gpu.device, GpuDevice)
    bodies, graphs = GraphBodies(of_gpu, of_gpu.device), of_gpu.device.graphs
    bodies.clear_mixed(80)
    if is_captured:
        mixed, pictured = Graphs(bodies.launch_mixed), Graphs(bodies.launch_pictured)
        graphs.mixed, graphs.pictured = mixed, pictured
    number = len(of_cpu.slots.tables_by_group)
    for plan, same in zip(plans(ids, pictures, number), plans(ids, pictures, number), strict=True):
        found, expected = of_gpu.step(plan).wait(), of_cpu.step(same).wait()
        assert found.tokens.tolist() == expected.tokens.tolist()
        has_pictures = plan.section(PictureRows) is not None
        if has_pictures and (positions := pictures.positions) is not None:
            start, length = int(plan.starts[1]), int(plan.lengths[1])
            rotary = of_gpu.device.buffers.whole.rotary
            assert rotary is not None
            first = int(plan.lengths[0])
            entered = rotary[:, first : first + length].numpy()
            assert (entered == positions[:, start : start + length]).all()
    if is_captured:
        assert len(pictured.replayed) == 2
    for mine, other in zip(of_gpu.device.kv.tensors, of_cpu.device.kv.tensors, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
