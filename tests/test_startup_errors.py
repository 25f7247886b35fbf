"""A start that cannot succeed ends with status 2 and one line that names the file or the key."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aioinfer.kernels.cpu_compilation import KERNELS

from aioinfer.__main__ import main
from tests.gguf_models import random_model, write_gguf
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may break."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def command(folder: Path, *settings: str) -> list[str]:
    base = [
        f"model.path={folder}", "parallel.device=cpu", "parallel.executor=inline", "server.port=0",
        "cache.num_blocks=8", "cache.block_size=16", "scheduler.max_num_seqs=2",
        "model.tokenizer=none", *settings,
    ]  # fmt: skip
    return [part for setting in base for part in ("--set", setting)]


def error_of(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> str:
    """Starts a server in this process, which must fail, and returns the line that it prints."""
    assert main(command(folder, *settings)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith("aioinfer: ")]
    assert len(messages) == 1, lines
    # what precedes it is a progress bar
    assert lines[-1] == messages[0], lines
    assert "Traceback" not in "".join(lines)
    return messages[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cache.num_blocks=1000000000000"], "cache.num_blocks = 1000000000000 take "),
        (["scheduler.max_num_seqs=100000"], "at most 65536"),
        (["cache.block_size=1000000000000"], "memory"),
    ],
    ids=str,
)
def test_sizes_beyond_the_machine(
    capsys: pytest.CaptureFixture[str], model: Path, settings: list[str], message: str
) -> None:
    assert message in error_of(capsys, model, *settings)


def test_a_cache_beyond_the_machine(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    config = model / "huge.toml"
    config.write_text(f'[model]\npath = "{model}"\ntokenizer = "none"\n')
    sizes = ["cache.cpu_memory_gib=100000", "parallel.device=cpu", "parallel.executor=inline"]
    arguments = [part for setting in sizes for part in ("--set", setting)]
    assert main(["--config", str(config), *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the KV cache takes 100000.00 GiB (cache.cpu_memory_gib), and the machine has " in last
    assert re.search(r": set cache.cpu_memory_gib to at most [\d.]+$", last)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def write_index(content: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def misplace(folder: Path) -> None:
    """Writes an index that locates a tensor in a file that lacks it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({"x": next(iter(tensors.values()))}, folder / "other.safetensors")
    files = dict.fromkeys(tensors, "model.safetensors")
    files["model.norm.weight"] = "other.safetensors"
    write_index({"weight_map": files})(folder)


def store_integers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(tensors | {name: tensors[name].int()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["model.safetensors", "cannot be read"]),
        (garble, ["model.safetensors", "cannot be read"]),
        (write_index([]), ["model.safetensors.index.json", "cannot be read"]),
        (write_index({"weight_map": []}), ["model.safetensors.index.json", "cannot be read"]),
        (write_index({"weight_map": {"x": 5}}), ["model.safetensors.index.json"]),
        (write_index({"weight_map": {}}), ["does not hold this model's tensors"]),
        (misplace, ["other.safetensors", "does not hold model.norm.weight"]),
        (store_integers, ["model.norm.weight", "I32"]),
    ],
)
def test_weights_that_are_damaged(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    damage(folder)
    line = error_of(capsys, folder)
    assert all(word in line for word in [str(folder), *words]), line


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": BYTE_LEVEL,
    "post_processor": None, "decoder": BYTE_LEVEL,
    "model": MODEL,
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "config"),
    [
        ("", {}),
        ("{}", {}),
        ("[]", {}),
        (json.dumps(TOKENIZER | {"model": {"type": "BPE"}}), {}),
        (json.dumps(TOKENIZER | {"model": MODEL | {"merges": ["a z"]}}), {}),
        (json.dumps(TOKENIZER | {"decoder": {"type": "Nothing"}}), {}),
        (json.dumps(TOKENIZER), {"added_tokens_decoder": 5}),
        (json.dumps(TOKENIZER), {"added_tokens_decoder": {"x": {"content": "<s>"}}}),
        (json.dumps(TOKENIZER), {"chat_template": 5}),
        (json.dumps(TOKENIZER), {"chat_template": "{% if %}"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tokenizers_that_are_damaged(
    capsys: pytest.CaptureFixture[str], folder: Path, content: str, config: dict[str, object]
) -> None:
    (folder / "tokenizer.json").write_text(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    line = error_of(capsys, folder, f"model.tokenizer={folder}")
    assert str(folder) in line or "the chat template is not valid" in line, line


@pytest.mark.extended
def test_a_disk_that_is_full_while_a_gguf_file_is_converted(tmp_path: Path) -> None:
    """Files of the child may have 100 kB, less than the weights: writing more fails as on a full
    disk, at another place of the conversion for each limit."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model("llama", tmp_path / "model"), "llama")

    def limit(size: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    for size in (64, 100_000):
        ended = subprocess.run(
            [sys.executable, "-m", "aioinfer", "--set", f"model.path={file}"],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}, preexec_fn=limit(size),
        )  # fmt: skip
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        lines = [line for line in ended.stderr.splitlines() if line.startswith("aioinfer: ")]
        assert len(lines) == 1, ended.stderr
        assert f"{file} cannot be converted into" in lines[0]
        assert "File too large" in lines[0]
        kept = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "aioinfer").iterdir()}
        assert kept <= set(KERNELS), "nothing is left behind but compiled kernels"


def test_traces_without_opentelemetry(model: Path) -> None:
    """In a process that cannot import it, as where it is not installed."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from aioinfer.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    settings = command(model, "tracing.endpoint=http://127.0.0.1:1")
    ended = subprocess.run(
        [sys.executable, "-c", code, *settings],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("aioinfer: tracing.endpoint needs OpenTelemetry")
    assert "pip install 'aioinfer[otel]'" in line
