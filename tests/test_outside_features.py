"""Step features of another package, tests/feature_package, under every way of executing steps: the
package is installed (its entry points are found), and nothing else knows of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.config import load_config
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.errors import ConfigError, RequestError
from aioinfer.features import FEATURES, load_halves
from aioinfer.llm import Output
from aioinfer.sampling_params import BeamSearch
from aioinfer.scheduler.features import StepFeature, StepFeatures
from aioinfer.scheduler.request import Finish, Request
from aioinfer.scheduler.steps import Row, StepOutput
from example_features.watch_token.planning import WatchedToken
from tests.automata import Runs, constrain
from tests.disturbance import worker_pids
from tests.executor_runs import planning_ahead
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 131  # two ranks do not divide it
WATCHED = (0, 65, 66, 130)  # the first and the last tokens of two ranks
EVEN = tuple(range(0, VOCAB_SIZE, 2))
TOKENS = 24
BASE = {
    "parallel.executor": "inline", "parallel.cpu_threads": 1, "model.dtype": "float32",
    "model.max_model_len": 256,
    "model.features": ["only_even", "watch_token"],
    "cache.block_size": 16, "cache.num_blocks": 200, "scheduler.max_num_seqs": 32,
    "scheduler.max_num_batched_tokens": 64,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.8, "min_p": 0.02, "logprobs": 3, "allowed_token_ids": range(40, 100)},
    {"temperature": 0.0, "allowed_token_ids": range(7, 90), "presence_penalty": 1.0},
    {"temperature": 0.7, "logit_bias": {8: 3.0, 9: 5.0}, "logprob_token_ids": WATCHED},
]
ARGUMENTS: list[dict[str, Any]] = [
    {"only_even": True}, {"watch_token": 65}, {}, {"only_even": True, "watch_token": 66},
]  # fmt: skip


def every_params() -> list[SamplingParams]:
    """Returns parameters of each kind with each of the arguments; some end before the others."""
    return [
        SamplingParams(
            seed=number, max_tokens=TOKENS - number, ignore_eos=True, extra_args=arguments, **kind
        )
        for number, arguments in enumerate(ARGUMENTS)
        for kind in KINDS
    ]


PARAMS = every_params()
PROMPTS = random_prompts([1 + 7 * number % 90 for number in range(len(PARAMS))], VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, initializer_range=0.3,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip


def start(folder: Path, **settings: Any) -> LLM:
    ahead = planning_ahead(settings)
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    with ahead:
        return LLM(str(folder), settings=BASE | changed, progress=False)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Output]:
    """The outputs of the requests one by one."""
    return [llm.generate([p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]


def check_equal(outputs: list[Output], expected: list[Output]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        for found, one in zip(output.completions, wanted.completions, strict=True):
            assert found.token_ids == one.token_ids
            assert found.features.keys() == one.features.keys()
            for name, values in one.features.items():
                assert np.allclose(found.features[name], values, atol=1e-3)


# ---------------------------------------------------------------- what the features do


def test_a_logits_processor_keeps_to_its_requests(llm: LLM, expected: list[Output]) -> None:
    """Its tokens are those under a mask of the same tokens, which the sampler applies itself."""
    for prompt, params, output in zip(PROMPTS, PARAMS, expected, strict=True):
        tokens = [token for one in output.completions for token in one.token_ids]
        assert any(token % 2 for token in tokens) != params.extra_args.get("only_even", False)
        if params.extra_args.get("only_even"):
            allowed = [token for token in params.allowed_token_ids or EVEN if token % 2 == 0]
            masked = replace(params, extra_args={}, allowed_token_ids=tuple(allowed))
            (same,) = llm.generate([prompt], [masked])
            assert [one.token_ids for one in same.completions] == [
                one.token_ids for one in output.completions
            ]


def test_a_section_comes_back_for_each_token(llm: LLM, expected: list[Output]) -> None:
    for params, output in zip(PARAMS, expected, strict=True):
        for one in output.completions:
            assert one.features.keys() == {"watch_token"} & params.extra_args.keys()
            if one.features:
                assert len(one.features["watch_token"]) == len(one.token_ids)
    assert expected[10].completions[0].features != expected[10].completions[1].features, "n is 2"
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=9, logprob_token_ids=WATCHED)
    outputs = llm.generate(
        PROMPTS[:1] * 4, [replace(params, extra_args={"watch_token": each}) for each in WATCHED]
    )
    logits = np.array([output.completions[0].features["watch_token"] for output in outputs]).T
    logprobs = outputs[0].completions[0].logprobs
    assert logprobs is not None
    wanted = np.array([[value for _, value in token.top] for token in logprobs])
    assert np.allclose(logits - logits[:, :1], wanted - wanted[:, :1], atol=1e-4)
    assert not np.allclose(logits, wanted), "these are no log-probabilities"


# ---------------------------------------------------------------- ways of executing steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"scheduler__plan_ahead": False},
        {"scheduler__max_num_batched_tokens": 40, "cache__num_blocks": 24},
        {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2},
        pytest.param({"parallel__executor": "multiprocess", "parallel__pipeline_parallel_size": 2},
                     marks=pytest.mark.extended),
    ],
    ids=["together", "not planned ahead", "preempted", "two ranks", "two stages"],
)  # fmt: skip
def test_every_way_gives_the_same(
    folder: Path, expected: list[Output], settings: dict[str, Any]
) -> None:
    with start(folder, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        engine = llm.frontend.engines[0]
        engine.scheduler.check_integrity()
        assert (engine.scheduler.stats.preemptions > 0) == ("cache__num_blocks" in settings)
    check_equal(outputs, expected)


@pytest.mark.extended
@pytest.mark.slow
def test_a_restart_of_the_workers_changes_nothing(folder: Path, expected: list[Output]) -> None:
    others = worker_pids()
    settings = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2}
    with start(folder, **settings) as llm, ThreadPoolExecutor(1) as pool:
        metrics = llm.frontend.engines[0].metrics
        running = pool.submit(llm.generate, PROMPTS, PARAMS)
        deadline = time.monotonic() + 30
        while metrics.generation_tokens < 150:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(worker_pids(others)[1], signal.SIGKILL)
        outputs = running.result()
        assert (metrics.restarts, metrics.interrupted > 10) == (1, True)
    check_equal(outputs, expected)


def test_a_row_in_vain_leaves_nothing(llm: LLM, expected: list[Output]) -> None:
    """The row that was posted before the end of its request was known."""
    number = 7  # greedy, and watches a token
    stop = expected[number].token_ids[9]
    params = replace(PARAMS[number], stop_token_ids=(stop,))
    count = expected[number].token_ids.index(stop) + 1
    scheduler = llm.frontend.engines[0].scheduler
    wasted = scheduler.stats.wasted_rows
    (output,) = llm.generate([PROMPTS[number]], [params])
    assert output.token_ids == expected[number].token_ids[:count]
    assert len(output.completions[0].features["watch_token"]) == count
    deadline = time.monotonic() + 10
    while scheduler.stats.wasted_rows == wasted:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(output.completions[0].features["watch_token"]) == count


def test_tokens_without_a_choice_are_not_sampled(llm: LLM) -> None:
    """They are appended behind a sampled token, and the row that was posted meanwhile is
    dropped."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, extra_args={"watch_token": 5})
    found = []
    for tells in (False, True):
        undo = constrain(llm.frontend, lambda _, tells=tells: Runs(VOCAB_SIZE, tells=tells))
        found.append(llm.generate(PROMPTS[:1], [params])[0].completions[0])
        undo()
    slow, jumping = found
    assert jumping.token_ids == slow.token_ids
    every, some = slow.features["watch_token"], jumping.features["watch_token"]
    assert len(every) == 60
    is_sampled, left = [], 0
    for token in slow.token_ids:
        is_sampled.append(not left)
        left = left - 1 if left else 6 * (token % 5 == 0)
    assert 10 < sum(is_sampled) < 50
    assert np.allclose(some, np.array(every)[is_sampled], atol=1e-3)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only_evn": True}, "'only_evn'; known are only_even, watch_token$"),
        ({"only_even": 1}, "only_even must be true or false$"),
        ({"watch_token": VOCAB_SIZE}, f"watch_token must be a token id, not {VOCAB_SIZE}$"),
    ],
)
def test_wrong_arguments(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(["a"], SamplingParams(extra_args=arguments))
    assert caught.value.param == "vllm_xargs"


def test_arguments_that_go_with_nothing() -> None:
    with pytest.raises(RequestError, match="extra_args must be a dict"):
        SamplingParams(extra_args=["only_even"])  # type: ignore[arg-type]


def test_a_beam_search_refuses_arguments() -> None:
    """Which would change nothing: it ranks tokens by the logits of the model."""
    with pytest.raises(RequestError, match="extra_args is not supported in a beam search"):
        SamplingParams(beam_search=BeamSearch(2), extra_args={"only_even": True})


def test_a_server_without_the_features(folder: Path) -> None:
    with (
        start(folder, model__features=[]) as llm,
        pytest.raises(RequestError, match=r"takes the argument 'only_even'; known are none$"),
    ):
        llm.generate(["a"], SamplingParams(extra_args={"only_even": True}))


def test_a_name_that_no_package_offers(folder: Path) -> None:
    workers = worker_pids()
    with pytest.raises(
        ConfigError,
        match=r"offers 'odd' \(entry point aioinfer.features\); offered are only_even, ",
    ):
        start(folder, model__features=["only_even", "odd"])
    assert worker_pids() == workers


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "broken cannot be imported: No module named 'broken'"),
        ({"__init__.py": ""}, "broken has none of planning, worker, serving$"),
        ({"__init__.py": "", "planning.py": "import absent"}, "No module named 'absent'$"),
    ],
    ids=["missing", "empty", "lacks a package"],
)
def test_a_package_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[aioinfer.features]\nbroken = broken\n")
    for name, text in files.items():
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_halves("planning", ("broken",))
    for name in ("broken", "broken.planning"):
        sys.modules.pop(name, None)


def test_names_and_arguments_are_taken_once() -> None:
    config = load_config(overrides={"model.path": "m"})
    host: Any = SimpleNamespace(config=config, metrics=EngineMetrics())
    halves = load_halves("planning", ("only_even", "only_even"))
    features = [half.Planning(host) for half in halves]
    assert len(features) == len(FEATURES) + 2
    with pytest.raises(ConfigError, match="several are named 'only_even'"):
        StepFeatures(features)

    class Other(StepFeature):
        name = "other"
        extra_args = ("only_even",)

    with pytest.raises(ConfigError, match="several take the argument 'only_even'"):
        StepFeatures([*features[:-1], Other(None)])


def test_places_of_rows() -> None:
    """Of a token that was taken, of one with appended tokens behind it, and of dropped ones."""
    params = SamplingParams()
    requests = [Request(str(number), array("i", [1]), 1, params, 9) for number in range(3)]
    output = StepOutput(
        [requests[0], requests[2], requests[2]], [5, 6, 7], [0, 2, 2], {2: Finish("stop")}
    )
    use = WatchedToken(0)
    rows = [Row(request, use, 0, 1, place) for place, request in enumerate(requests)]
    assert output.places(rows) == [0, -1, 1]
    assert output.places([rows[0]._replace(place=-1)]) == [-1]


# ---------------------------------------------------------------- the page


def test_the_page_shows_the_package() -> None:
    """All of one feature but its imports, and parts of the other."""
    root = Path(__file__).parent
    page = (root.parent / "docs" / "features.md").read_text("utf-8")
    shown = [block.partition("```")[0].strip("\n") for block in page.split("```python\n")[1:]]
    files = sorted((root / "feature_package" / "example_features").glob("*/*.py"))
    codes = {file: without_imports(file.read_text("utf-8")) for file in files}
    for block in shown:
        assert any(block in code for code in codes.values()), block
    whole = [code for file, code in codes.items() if code and file.parent.name == "only_even"]
    assert len(whole) == 3
    assert {*whole} < {*shown}
    (points,) = (root / "feature_package").glob("*/entry_points.txt")
    name, _, package = points.read_text("utf-8").splitlines()[1].partition(" = ")
    assert f'`{name} = "{package}"`' in page


def without_imports(code: str) -> str:
    """Returns what follows the imports of a module."""
    lines = code.splitlines(keepends=True)
    last = max(
        (n for n, line in enumerate(lines) if line.startswith(("import ", "from "))), default=-1
    )
    return "".join(lines[last + 1 :]).strip("\n")
