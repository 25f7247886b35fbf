"""Nothing in the package reads a pickle: a pickle runs code of whoever wrote it.

Messages between the server and its own workers are the exception: they travel over pipes that no
other process has (`multiprocessing.connection`), and under torchrun over a Unix socket in a folder
of the user's alone. What other hosts send is JSON.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Calls and modules that unpickle.
UNPICKLES = re.compile(
    r"torch\.load\b|\bpickle\b|\bcPickle\b|\bdill\b|\bjoblib\b|\bshelve\b|\bmarshal\b"
    r"|allow_pickle\s*=\s*True|\bread_pickle\b"
)
SOURCES = sorted([*ROOT.glob("aioinfer/**/*.py"), *ROOT.glob("kernels/*.py")])


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_unpickles(file: Path) -> None:
    lines = file.read_text("utf-8").splitlines()
    found = [line for line in lines if UNPICKLES.search(line.partition("#")[0])]
    assert found == []


def test_weights_are_looked_for_in_safetensors_files_only(tmp_path: Path) -> None:
    from aioinfer.checkpoint.source import _TEXT_FILES
    from aioinfer.errors import ConfigError
    from aioinfer.models.loader import locate_tensors

    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")  # the pickle of 1
    with pytest.raises(ConfigError, match="holds no safetensors files"):
        locate_tensors(tmp_path)
    assert not any(pattern.endswith((".bin", ".pt", ".pth", ".pkl")) for pattern in _TEXT_FILES)
