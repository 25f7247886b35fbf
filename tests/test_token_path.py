"""The path of a decode token stays short, and is measured right."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

import token_path
from token_path import MIN_INTERVALS, TokenPath, code_lines, measure, read_path, recording

pytestmark = pytest.mark.slow

#: Limits of the path with a worker process on a CPU: files, and lines of code in them.
MAX_FILES = 46
MAX_CODE_LINES = 8400

SOURCE = '''"""A module.

Two lines of text.
"""

import os  # a comment

VALUES = (
    1,
    # a comment of its own
    2,
)
TEXT = """one
two"""


class Thing:
    """A class."""

    name: str
    """The thing's name."""

    def do(self):
        """A method."""

        return os.path.join("a", "b")  # another
'''


@pytest.fixture(scope="module")
def path() -> TokenPath:
    return measure()


def test_the_path_is_within_its_limits(path: TokenPath) -> None:
    assert len(path.files) <= MAX_FILES
    assert path.code_lines <= MAX_CODE_LINES


def test_the_path_goes_from_the_result_of_a_step_to_the_socket(path: TokenPath) -> None:
    names = {name for file in path.files for name in file.functions}
    assert names >= {
        "Ring.read", "Engine._step", "Scheduler.update", "Scheduler.schedule", "Ring.write",
        "ModelRunner.step", "Layer.__call__", "LMHead.__call__", "Sampler.sample",
        "Detokenizer.next", "DirectSink.push",
    }  # fmt: skip
    assert [file.stage for file in path.files] == sorted(
        (file.stage for file in path.files), key=token_path.STAGES.index
    )


def test_what_is_no_part_of_a_step_is_not_on_the_path(path: TokenPath) -> None:
    names = {name for file in path.files for name in file.functions}
    assert names.isdisjoint(
        {"Scheduler.add", "Frontend.launch", "LoopLag._measure", "Heartbeat.__init__"}
    )


def test_every_file_has_code_and_no_more_is_called(path: TokenPath) -> None:
    for file in path.files:
        assert file.functions
        assert 0 <= file.called_lines <= file.code_lines
    assert "aioinfer/scheduler/request.py" in {file.path for file in path.declaring}
    assert not any(file.functions for file in path.declaring)


def test_comments_and_docstrings_are_no_code() -> None:
    lines = SOURCE.splitlines()
    assert [lines[number - 1].strip() for number in sorted(code_lines(SOURCE))] == [
        "import os  # a comment", "VALUES = (", "1,", "2,", ")", 'TEXT = """one', 'two"""',
        "class Thing:", "name: str", "def do(self):",
        'return os.path.join("a", "b")  # another',
    ]  # fmt: skip


def test_a_function_called_by_a_timer_is_not_on_the_path(tmp_path: Path) -> None:
    from aioinfer.ipc.masks import buffer_of, mask_words

    async def call() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(MIN_INTERVALS):
            recorder.interval += 1
            loop.call_soon(buffer_of, 1)
            loop.call_later(0, mask_words, 1)
            await asyncio.sleep(0.01)

    with (
        recording(tmp_path) as recorder,
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        sys.setprofile(recorder.record)
        runner.run(call())
        sys.setprofile(None)
    (file,) = read_path(tmp_path).files
    assert (file.path, file.functions) == ("aioinfer/ipc/masks.py", ["buffer_of"])


def test_a_triton_kernel_is_on_the_path_with_those_that_it_calls(tmp_path: Path) -> None:
    """The launches fail where there is no GPU."""
    sampling = pytest.importorskip("aioinfer.kernels.sampling")
    with recording(tmp_path) as recorder:
        sys.setprofile(recorder.record)
        for _ in range(MIN_INTERVALS):
            recorder.interval += 1
            with contextlib.suppress(Exception):
                sampling._chunk_kernel[(1,)]()
        sys.setprofile(None)
    launch, file = read_path(tmp_path).files
    assert {launch.stage, file.stage} == {"kernels"}
    assert (launch.path, file.path) == ("kernels/launch.py", "kernels/sampling.py")
    assert launch.functions == ["wait_for_kernel"]
    assert file.functions == ["_mix", "uniform_noise", "_gumbel", "_chunk_kernel"]
