"""Reading the JSON files of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioinfer.errors import ConfigError
from aioinfer.text.json_file import read_json


def test_an_object_or_nothing(tmp_path: Path):
    file = tmp_path / "some.json"
    assert read_json(file) == {}
    file.write_text('{"a": [1, "é"]}', "utf-8")
    assert read_json(file) == {"a": [1, "é"]}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"], ids=["cut off", "a list", "not UTF-8"])
def test_a_file_that_holds_something_else(tmp_path: Path, content: bytes):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.json"):
        read_json(tmp_path / "some.json")
