"""The check of a KV cache in float8 at the start: what it measures, and whom it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from aioinfer.errors import ConfigError
from aioinfer.worker import cache_check
from aioinfer.worker.cache_check import check_loss, expected_loss, text_tokens
from tests.test_worker import load, make_worker
from tests.tiny_models import tiny_model


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 7, "is": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_loss_is_the_divergence_of_distributions() -> None:
    plain = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]).log()
    rounded = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()
    assert expected_loss(plain, plain) == 0.0
    assert expected_loss(plain, rounded) == pytest.approx(math.exp(0.25 * math.log(2)) - 1)
    assert expected_loss(plain, plain - 1e4) == math.inf


@pytest.mark.parametrize(("loss", "is_refused"), [(0.005, False), (0.03, True), (math.nan, True)])
def test_a_large_loss_is_refused(loss: float, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match="set it to 'model', or to 'fp8_unchecked'"):
            check_loss(loss)
    else:
        check_loss(loss)


def test_the_text_is_read_with_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    assert text_tokens(tmp_path, 10, 50) is None
    save_tokenizer(tmp_path)
    tokens = text_tokens(tmp_path, 10, 50)
    assert tokens is not None
    assert len(tokens) == 50
    assert {0, 7, 9} >= set(tokens.tolist()) > {0}
    assert text_tokens(tmp_path, 7, 50) is None, "tokens that the model does not have"
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    assert text_tokens(tmp_path, 10, 50) is None


@pytest.mark.parametrize(
    ("dtype", "has_tokenizer", "is_refused"),
    [("fp8", True, True), ("fp8", False, False), ("fp8_unchecked", True, False)],
)
def test_a_worker_compares_the_cache_with_one_that_is_not_rounded(
    dtype: str, has_tokenizer: bool, is_refused: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    losses: list[float] = []
    monkeypatch.setattr(cache_check, "MAX_LOSS", 0.0)
    monkeypatch.setattr(cache_check._log, "info", lambda _, loss: losses.append(loss))
    tiny_model("llama", tmp_path)
    if has_tokenizer:
        save_tokenizer(tmp_path)
    worker = make_worker(tmp_path, dtype=dtype)
    assert "calibrated" in load(worker).cache_dtype
    worker.allocate((16,), 200)
    if is_refused:
        with pytest.raises(ConfigError, match="harms this model"):
            worker.warm_up()
        assert 0.0 < losses[0] < 1.0  # of 100: a part of a per cent
    else:
        worker.warm_up()
        assert not losses
    for kv in worker.runner.device.kv.tensors:
        assert not kv.float().any(), "a trace of the check is left"
