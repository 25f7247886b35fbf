"""The options that say which model to run and how, and the line with which a command that runs one
begins: for `serve`, `batch`, `chat` and `deploy`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from aioinfer import __version__
from aioinfer.config import Config, load_config, load_models, parse_override
from aioinfer.errors import ConfigError


def add_model_options(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Adds MODEL, `--config`, `--set` and `--hf-overrides`."""
    if positional:
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="a hub id, a folder, a GGUF file or package:NAME/FILE (model.path)",
        )
    parser.add_argument("--config", metavar="FILE", help="a TOML file, such as configs/qwen.toml")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="lay a value over the file's (repeatable)",
    )
    parser.add_argument(
        "--hf-overrides",
        metavar="JSON",
        help="an object that is laid over the model's config.json (model.hf_overrides)",
    )


def announce(work: str) -> None:
    """Writes to stderr which action a command performs, before it imports PyTorch and is silent for
    seconds."""
    sys.stderr.write(f"aioinfer {__version__} {work} (PyTorch is imported first) ...\n")


def load(options: argparse.Namespace, more: Mapping[str, Any] | None = None) -> Config:
    """Returns the configuration that the options describe; `more` is laid over it.

    Raises `ConfigError`, also for one of several models.
    """
    return load_config(options.config, _overrides(options, more))


def load_all(options: argparse.Namespace, more: Mapping[str, Any]) -> list[Config]:
    """Returns the configuration of each model that the options describe; `more` is laid over it.

    Raises `ConfigError`.
    """
    return load_models(options.config, _overrides(options, more))


def _overrides(options: argparse.Namespace, more: Mapping[str, Any] | None) -> dict[str, Any]:
    model = getattr(options, "model", None)
    named = any(text.partition("=")[0].strip() == "model.path" for text in options.set)
    if model is None and options.config is None and not named:
        raise ConfigError("which model? Name one, or a file with --config")
    given: dict[str, Any] = {} if model is None else {"model.path": model}
    if options.hf_overrides is not None:
        given["model.hf_overrides"] = _decoded(options.hf_overrides)
    return {**given, **(more or {}), **dict(map(parse_override, options.set))}


def _decoded(text: str) -> Any:
    """Returns the value of `--hf-overrides`. Raises `ConfigError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--hf-overrides must be a JSON object: {error}") from error
