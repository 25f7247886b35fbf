"""The file of the fastest kernels: read by the same machine alone, and never an obstacle."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from aioinfer.layers.kernel_choices import StoredChoices, Texts, hash_sources

MACHINE = {"card": "NVIDIA H200", "multiprocessors": "132", "triton": "3.6.0", "kernels": "ab"}
PRODUCT = "dense plain 8x8 bfloat16"
MEASURED: Texts = {PRODUCT: {2: "cublas", 4: "few_rows_dense features=4"}}


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    assert StoredChoices(folder, MACHINE).read() == {}
    StoredChoices(folder, MACHINE).add(MEASURED)
    assert StoredChoices(folder, MACHINE).read() == MEASURED
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def test_models_share_the_file(tmp_path: Path) -> None:
    first = StoredChoices(tmp_path, MACHINE)
    assert first.add(MEASURED) == MEASURED
    other: Texts = {PRODUCT: {1: "a"}, "dense gated 4x8 bfloat16": {1: "c"}}
    assert StoredChoices(tmp_path, MACHINE).add(other) == other
    assert first.read() == {
        PRODUCT: {1: "a", 2: "cublas", 4: "few_rows_dense features=4"},
        "dense gated 4x8 bfloat16": {1: "c"},
    }


def test_what_was_read_is_replaced(tmp_path: Path) -> None:
    """A stored candidate that no longer exists is timed again."""
    StoredChoices(tmp_path, MACHINE).add(MEASURED)
    stored = StoredChoices(tmp_path, MACHINE)
    stored.read()
    assert stored.add({PRODUCT: {2: "new"}}) == {PRODUCT: {2: "new"}}
    assert stored.read()[PRODUCT] == {2: "new", 4: "few_rows_dense features=4"}


def test_of_two_that_start_together_the_first_decides(tmp_path: Path) -> None:
    first, second = (StoredChoices(tmp_path, MACHINE) for _ in range(2))
    assert first.read() == second.read() == {}
    first.add({PRODUCT: {2: "cublas"}})
    assert second.add({PRODUCT: {2: "other", 4: "new"}}) == {PRODUCT: {2: "cublas", 4: "new"}}
    assert first.read() == {PRODUCT: {2: "cublas", 4: "new"}}


@pytest.mark.parametrize("field", MACHINE)
def test_another_card_or_version_reads_nothing(field: str, tmp_path: Path) -> None:
    StoredChoices(tmp_path, MACHINE).add(MEASURED)
    other = StoredChoices(tmp_path, MACHINE | {field: "another"})
    assert other.read() == {}
    other.add({})
    assert StoredChoices(tmp_path, MACHINE).read() == MEASURED


def test_a_file_that_was_copied_from_another_machine(tmp_path: Path) -> None:
    stored, other = StoredChoices(tmp_path, MACHINE), StoredChoices(tmp_path, {"card": "other"})
    other.add(MEASURED)
    other.path.rename(stored.path)
    assert stored.read() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"', b"{}",
        json.dumps({"machine": MACHINE}).encode(),
        json.dumps({"machine": MACHINE, "choices": []}).encode(),
        json.dumps({"machine": MACHINE, "choices": {"product": []}}).encode(),
        json.dumps({"machine": MACHINE, "choices": {"product": {"two": "cublas"}}}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = StoredChoices(tmp_path, MACHINE)
    stored.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert stored.read() == {}
    assert "timed again" in caplog.text
    stored.add(MEASURED)
    assert stored.read() == MEASURED


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "a file"
    folder.write_text("")
    with caplog.at_level(logging.WARNING):
        StoredChoices(folder, MACHINE).add(MEASURED)
    assert "cannot be stored" in caplog.text


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredChoices(tmp_path, MACHINE)
    stored.add(MEASURED)

    def fail(source: str, target: Path) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        stored.add({"other": {1: "cublas"}})
    assert stored.read() == MEASURED
    assert len(list(tmp_path.iterdir())) == 1


def test_the_hash_follows_names_and_texts(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text("first")
    before = hash_sources(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert hash_sources(tmp_path) == before
    (tmp_path / "linear.py").write_text("second")
    changed = hash_sources(tmp_path)
    (tmp_path / "linear.py").rename(tmp_path / "other.py")
    assert len({before, changed, hash_sources(tmp_path)}) == 3
