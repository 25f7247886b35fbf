"""The worker: what it selects and reports when it loads, that warm-up leaves no trace, and that it
executes plans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aioinfer.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.ipc.plan import Admission, Admissions
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.selection import select_device, select_dtype
from aioinfer.worker.worker import LoadReport, Worker
from tests.plans import make_plan

CPU = torch.device("cpu")
VOCAB = 120
ONE_TOO_LARGE = (
    "parallel.tensor_parallel_size = 4 takes 4 GPUs, and torch finds 2: "
    "lower parallel.tensor_parallel_size"
)
BOTH_TOO_LARGE = (
    "parallel.tensor_parallel_size = 2 times parallel.data_parallel_size = 4 takes 8 GPUs, and "
    "torch finds 6: "
    "lower parallel.tensor_parallel_size or parallel.data_parallel_size"
)
PROMPT = [5, 99, 23, 7, 64, 31, 8, 2, 77]


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_worker(
    folder: Path, *, max_num_seqs: int = 4, model: dict[str, Any] | None = None, **cache: Any
) -> Worker:
    config = Config(
        model=ModelConfig(path=str(folder), **(model or {})),
        cache=CacheConfig(**({"cpu_memory_gib": 0.01} | cache)),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        parallel=ParallelConfig(device="cpu", cpu_threads=1),
    )
    return Worker(config, folder, ProcessGroups.single())


def load(worker: Worker) -> LoadReport:
    return worker.load(lambda done, total: None)


def test_loading_reports_sizes_and_progress(folder: Path) -> None:
    worker = make_worker(folder)
    progress: list[tuple[int, int]] = []
    report = worker.load(lambda done, total: progress.append((done, total)))
    assert report.device == "cpu (1 thread)"
    assert torch.get_num_threads() == 1
    assert report.dtype == "float32 (the weights are bfloat16, in which few CPUs compute fast)"
    parameters = LlamaForCausalLM.from_pretrained(folder).num_parameters()
    assert report.weights_bytes == 4 * parameters
    assert progress[-1] == (4 * parameters, 4 * parameters)
    assert report.block_size == 16
    assert report.groups == (KVGroup(AttentionSpec(2, 8), (0, 1)),)
    assert report.block_bytes == (2 * 2 * 16 * 2 * 8 * 4,)
    assert report.num_blocks == (int(0.01 * 2**30) // report.block_bytes[0],)
    assert report.model_max_len == 64
    assert report.vocab_size == VOCAB
    assert report.implementation == "plain torch"


def test_dummy_weights_need_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    worker = make_worker(tmp_path, model={"load_format": "dummy"})
    assert load(worker).weights_bytes == load(make_worker(folder)).weights_bytes
    worker.allocate((4,), 20)
    assert 0 <= greedy(worker, PROMPT, 1)[0] < VOCAB


def greedy(worker: Worker, prompt: list[int], count: int) -> list[int]:
    """Runs a request in slot 0 and blocks 0, 1, 2, ..."""
    blocks = range(-(-(len(prompt) + count) // worker.block_size))
    admission = Admission(
        0, np.array(prompt, np.int32), len(prompt), SamplingParams(temperature=0), 0
    )
    tokens: list[int] = []
    for step in range(count):
        if step:
            plan = make_plan(step, [(0, len(prompt) + step - 1, 1, 1)])
        else:
            growth = [(0, block, block) for block in blocks]
            plan = make_plan(0, [(0, 0, len(prompt), 1)], growth, [Admissions.of([admission])])
        tokens += worker.runner.step(plan).wait().tokens.tolist()
    return tokens


def test_it_executes_plans_in_float32(folder: Path) -> None:
    worker = make_worker(folder)
    load(worker)
    worker.allocate((3,), 40)
    worker.warm_up()
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    output = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    expected = output[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 3
    assert greedy(worker, PROMPT, 20) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_serve_a_cpu_that_is_configured_so(folder: Path, dtype: str) -> None:
    worker = make_worker(folder, model={"dtype": dtype})
    assert load(worker).dtype == dtype
    worker.allocate((3,), 40)
    worker.warm_up()
    assert worker.runner.device.kv.tensors[0].dtype == getattr(torch, dtype)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    logits = theirs(torch.tensor([PROMPT])).logits[0, -1].float()
    (token,) = greedy(worker, PROMPT, 1)
    # the likeliest but for rounding, of which the other tokens are far
    assert logits[token] > logits.max() - 0.02 * logits.std()
    assert logits.topk(5).values[-1] < logits.max() - 0.02 * logits.std()


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_model_len", "max_num_seqs"),
    [(16, 10, 64, 4), (1, 3, 3, 2), (16, 1, 16, 4), (4, 2, 1, 1), (2, 2, 4, 1)],
)
def test_warm_up_leaves_no_trace_at_any_size(
    folder: Path, block_size: int, num_blocks: int, max_model_len: int, max_num_seqs: int
) -> None:
    worker = make_worker(folder, block_size=block_size, max_num_seqs=max_num_seqs)
    load(worker)
    worker.allocate((num_blocks,), max_model_len)
    untouched = make_worker(folder, block_size=block_size, max_num_seqs=max_num_seqs)
    load(untouched)
    untouched.allocate((num_blocks,), max_model_len)
    worker.warm_up()
    runner = worker.runner
    (kv,) = runner.device.kv.tensors
    assert kv.shape == (2, 2, num_blocks, block_size, 2, 8)
    assert kv.count_nonzero() == 0
    assert runner.slots.tokens.shape == (max_num_seqs, max_model_len + 1)
    for name, fresh in vars(untouched.runner.slots).items():
        if isinstance(fresh, torch.Tensor):
            assert getattr(runner.slots, name).equal(fresh), name
        elif isinstance(fresh, np.ndarray):
            assert (getattr(runner.slots, name) == fresh).all(), name


def test_a_cache_that_cannot_hold_the_longest_request_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model.max_model_len = 64 needs .* of KV cache, and .* are left: set "
        r"cache.cpu_memory_gib to at least",
    ):
        load(make_worker(folder, model={"max_model_len": 64}, cpu_memory_gib=1e-5))
    with pytest.raises(ConfigError, match=r"set cache.num_blocks to at least 4"):
        load(make_worker(folder, model={"max_model_len": 64}, num_blocks=3))


def make_config(device: str, size: int = 1, engines: int = 1) -> Config:
    parallel = ParallelConfig(device=device, tensor_parallel_size=size, data_parallel_size=engines)  # type: ignore[arg-type]
    return Config(model=ModelConfig(path="x"), parallel=parallel)


def test_the_device_follows_configuration_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert select_device(make_config("auto"), 0) == select_device(make_config("cpu"), 0) == CPU
    with pytest.raises(ConfigError, match=r"parallel.device = 'cuda'.*'cpu' or 'auto'"):
        select_device(make_config("cuda"), 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        select_device(make_config("auto", 2), 1)
        == select_device(make_config("cuda", 2), 1)
        == torch.device("cuda:1")
    )
    assert select_device(make_config("cpu", 4), 3) == CPU
    with pytest.raises(ConfigError, match="^" + re.escape(ONE_TOO_LARGE) + "$"):
        select_device(make_config("auto", 4), 0)


def test_engines_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    config = make_config("auto", 2, 3)
    devices = [select_device(config, rank, engine) for engine in range(3) for rank in range(2)]
    assert devices == [torch.device("cuda", index) for index in range(6)]
    with pytest.raises(ConfigError, match="^" + re.escape(BOTH_TOO_LARGE) + "$"):
        select_device(make_config("cuda", 2, 4), 0, 0)
    behind = replace(
        config, parallel=replace(config.parallel, data_parallel_size=2, device="cuda:2")
    )
    devices = [select_device(behind, rank, engine) for engine in range(2) for rank in range(2)]
    assert devices == [torch.device("cuda", index) for index in range(2, 6)]
    behind = replace(config, parallel=replace(behind.parallel, device="cuda:3"))
    with pytest.raises(
        ConfigError, match=r"takes 4 GPUs from the one of parallel.device = 'cuda:3' on, and"
    ):
        select_device(behind, 0, 0)


def test_the_cores_are_shared_out_over_all_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert (
        load(Worker(make_config("cpu", 1, 3), folder, ProcessGroups.single(), 2)).device
        == "cpu (4 threads)"
    )


def test_the_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu() -> None:
    gpu = torch.device("cuda")
    assert select_dtype("auto", torch.bfloat16, gpu) == (torch.bfloat16, "bfloat16")
    assert select_dtype("auto", torch.float32, gpu) == (torch.float32, "float32")
    found = select_dtype("auto", torch.float8_e4m3fn, gpu)
    assert found == (torch.bfloat16, "bfloat16 (the weights are float8_e4m3fn)")
    assert select_dtype("auto", torch.float32, CPU) == (torch.float32, "float32")
    assert select_dtype("auto", torch.float16, CPU)[0] == torch.float32
    assert select_dtype("bfloat16", torch.float32, CPU) == (torch.bfloat16, "bfloat16")
