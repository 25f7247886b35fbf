"""The start-up table."""

from __future__ import annotations

import re

import pytest

from aioinfer.executor.base import WorkerReport
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.startup import StartupDisplay


def make_report(number: int, groups: tuple[KVGroup, ...], *num_blocks: int) -> WorkerReport:
    return WorkerReport(
        "cpu", "float32", 2**20, 2**30, 16, groups, num_blocks, 900 - number, "reason",
        [("load weights", 1.0 + number)], implementation="Triton kernels",
    )  # fmt: skip


def shown_for(reports: list[WorkerReport], capsys: pytest.CaptureFixture[str]) -> str:
    StartupDisplay().show(reports, ["model"])
    return capsys.readouterr().err


def test_the_table_shows_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    groups = (KVGroup(AttentionSpec(2, 64), (0, 1)),)
    reports = [make_report(number, groups, 100 + number) for number in range(2)]
    shown = shown_for(reports, capsys)
    assert re.search(r"engine 0 +│ 1.00 GiB a worker: 100 blocks of 16 tokens", shown)
    assert re.search(r"engine 1 +│ 1.00 GiB a worker: 101 blocks of 16 tokens", shown)
    assert re.search(r"longest request +│ 899 tokens \(reason\)", shown)
    assert re.search(r"load weights +│ 2.00 s", shown), "the slowest counts"
    assert re.search(r"model +│ Triton kernels", shown)
    shown = shown_for(reports[:1], capsys)
    assert "engine" not in shown
    assert re.search(r"KV cache +│ 1.00 GiB a worker: 100 blocks", shown)


def test_the_table_shows_what_each_group_of_layers_keeps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    groups = (KVGroup(AttentionSpec(1, 256, 512), (0, 1, 3)), KVGroup(AttentionSpec(1, 256), (2,)))
    shown = shown_for([make_report(0, groups, 70, 900)], capsys)
    assert re.search(r"KV cache +│ 1.00 GiB a worker +│", shown)
    assert (
        "3 layers from 0 to 3: keys and values of 1 head of size 256, a window of 512 tokens: "
        "70 blocks of 16 tokens" in shown
    )
    assert "layer 2: keys and values of 1 head of size 256: 900 blocks of 16 tokens" in shown


def test_a_bar_for_each_phase(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "100")

    def drawn() -> list[str]:
        """Returns the bars of the last time that they were drawn, without colours."""
        display._progress.refresh()
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    with StartupDisplay() as display:
        display.on_progress("find the model", 0, 0)
        (found,) = {line.split("━")[0].strip() for line in drawn()}
        assert found == "find the model"
        display.on_progress("load weights", 1, 4)
        first, second = drawn()[-2:]
        assert "100 %" in first
        assert second.startswith("load weights")
        assert "25 %" in second
        display.on_progress("allocate, warm up", 0, 0)
        lines = drawn()[-3:]
        assert ["100 %" in line for line in lines] == [True, True, False]
