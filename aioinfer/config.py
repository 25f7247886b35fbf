"""The configuration: frozen dataclasses read from one TOML file.

Every key is declared once, with its documentation and its bounds (`config_sections`). `load_config`
reads and checks a file: an unknown key, a wrong type or a value out of bounds raises `ConfigError`,
which names the key (for an unknown one, the nearest that exists); see `config_keys`.
`describe_keys` lists all keys for `--keys` and for `docs/configuration.md`. Nothing is read from
environment variables but by OpenTelemetry.

A file may describe several models (`load_models`): a table of `[[models]]` has the sections of the
file again, with the values in which a model differs from the others.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from aioinfer.config_keys import (
    check_value,
    default_text,
    hints_of,
    nearest,
    parse_address,
    type_name,
)
from aioinfer.config_sections import (
    CacheConfig,
    ChatConfig,
    LoggingConfig,
    LoraConfig,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    PoolingConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
    TracingConfig,
)
from aioinfer.errors import ConfigError, RequestError
from aioinfer.sampling_params import SamplingParams

__all__ = [
    "CacheConfig",
    "ChatConfig",
    "Config",
    "LoggingConfig",
    "LoraConfig",
    "MediaConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculationConfig",
    "TracingConfig",
    "describe_keys",
    "load_config",
    "load_models",
    "parse_override",
]

#: Draft tokens in a step, at most: with more rows, products take as long as they have arithmetic,
#: and a draft costs what it saves.
MAX_LOOKAHEAD = 384
#: Sections in which the models of a server cannot differ; of `server`, the names alone may.
_OF_SERVER = ("server", "logging", "tracing")
#: Keys whose value, a place, is for one model alone.
_OWN_PLACES = (("cache", "disk_path"), ("cache", "peer_address"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration: one field for each section."""

    model: ModelConfig
    chat: ChatConfig = field(default_factory=ChatConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    @property
    def served_model_names(self) -> list[str]:
        """The names that a request's `model` may have; replies carry the first."""
        return self.server.served_model_names or [self.model.path]

    @property
    def name(self) -> str:
        """The first of these names, which stands for the model."""
        return self.served_model_names[0]

    @property
    def max_lookahead(self) -> int:
        """The maximum of draft tokens in a step, of all requests together; 0 without
        speculation."""
        speculation = self.speculation
        if speculation.method == "none":
            return 0
        return min(MAX_LOOKAHEAD, speculation.max_draft_tokens * self.scheduler.max_num_seqs)

    @property
    def max_sampled_rows(self) -> int:
        """The maximum of rows of which a step samples a token, those of drafts included."""
        return self.scheduler.max_num_seqs + self.max_lookahead

    @property
    def max_step_tokens(self) -> int:
        """The maximum of tokens in a step, and of sampled rows, which may be more where the budget
        is small."""
        return max(self.scheduler.max_num_batched_tokens, self.max_sampled_rows)

    @property
    def prefill_cap(self) -> int:
        """The maximum of prefill tokens in a step that also decodes: all of the budget where
        nothing else bounds them but predicted times, or no stream is read (`without_streams`)."""
        budget = self.scheduler.max_num_batched_tokens
        takes_all = self.paces_prefill or self.scheduler.target_itl_ms == math.inf
        return budget if takes_all else max(1, budget // 4)

    @property
    def paces_prefill(self) -> bool:
        """Whether the predicted time of such a step bounds its prefill tokens. The steps of a
        pipeline overlap, and the time between two results does not say what one takes."""
        target = self.scheduler.target_itl_ms
        return target not in (None, math.inf) and self.parallel.pipeline_parallel_size == 1

    def without_streams(self) -> Config:
        """Returns the configuration of engines whose streams no client reads: the time between two
        tokens may be any."""
        return replace(self, scheduler=replace(self.scheduler, target_itl_ms=math.inf))


def load_config(
    file: str | Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> Config:
    """Reads a TOML file, applies overrides and checks the result.

    Args:
        file: the TOML file; None starts from an empty configuration.
        overrides: `section.key=value` strings (a value in TOML's notation, or a bare string), or a
            mapping of `"section.key"` to values; `section.key.name` is an entry of a table. Another
            `model.path` than the file's also removes the file's `server.served_model_names`.

    Raises:
        ConfigError: an unknown section or key (the nearest right one is named), a wrong type or
            value, a missing key, a file that cannot be read, or one of several models.
    """
    configs = load_models(file, overrides)
    if len(configs) > 1:
        raise ConfigError(f"{file} has several [[models]], which a server alone can have")
    return configs[0]


def load_models(
    file: str | Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> list[Config]:
    """Returns the configuration of each model of a server, as `load_config` does; the first is the
    one of requests that name none. Overrides are for all of them."""
    try:
        tree = {} if file is None else tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    pairs = dict(overrides if isinstance(overrides, Mapping) else map(parse_override, overrides))
    tables = tree.pop("models", [{}])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ConfigError("models must be tables: [[models]]")
    if len(tables) < 2:
        return [_load(_laid_over(tree, each), pairs) for each in tables or [{}]]
    configs = []
    for number, table in enumerate(tables, 1):
        try:
            _check_table(table)
            # needed for sleep on a GPU; where it is set to false there, the start fails
            merged = _laid_over({"model": {"sleep_mode": True}}, _laid_over(tree, table))
            configs.append(_load(merged, pairs))
        except ConfigError as error:
            place = "" if _is_of_all(error, tree, pairs) else f"[[models]], number {number}: "
            raise ConfigError(f"{place}{error}") from error
    _check_models(configs)
    return configs


def _is_of_all(error: ConfigError, tree: dict[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Returns whether an error of one of several models lies in what all of them share: it is the
    same without the model's own table."""
    try:
        _load(_laid_over(tree, {"model": {"path": "none"}}), overrides)
    except ConfigError as shared:
        return str(shared) == str(error)
    return False


def _load(tree: dict[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Returns the configuration of a tree of values with overrides, which are laid over it. Raises
    `ConfigError`."""
    _drop_names(tree, overrides)
    for dotted, value in overrides.items():
        section, _, name = dotted.partition(".")
        if not name:
            raise ConfigError(
                f"{dotted!r} is not a key: write "
                f"section.key{nearest(dotted, [k for k, *_ in describe_keys()])}"
            )
        keys = tree.setdefault(section, {})
        if not isinstance(keys, dict):
            raise ConfigError(f"[{section}] must be a section")
        name, dot, entry = name.partition(".")
        if dot:  # of a table
            given = keys.get(name)
            value = (given if isinstance(given, dict) else {}) | {entry: value}
        keys[name] = value
    config = cast(Config, _build(Config, tree, ""))
    _check_combinations(config)
    return config


def _laid_over(tree: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a file with the values of a table, which has sections as well, over
    them."""
    merged = {name: dict(each) if isinstance(each, dict) else each for name, each in tree.items()}
    for name, values in table.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(values, dict):
            merged[name] = below | values
        else:
            merged[name] = values
    return merged


def _check_table(table: Mapping[str, Any]) -> None:
    """Checks that a table of `[[models]]` has only what models may differ in. Raises
    `ConfigError`."""
    for section in _OF_SERVER:
        keys = table.get(section)
        for name in keys if isinstance(keys, dict) else ():
            if (section, name) != ("server", "served_model_names"):
                raise ConfigError(f"{section}.{name} is for the whole server: give it once")


def _check_models(configs: Sequence[Config]) -> None:
    """Checks what involves several models of one server. Raises `ConfigError`."""
    names = Counter(
        name for each in configs for name in {*each.served_model_names, *each.lora.adapters}
    )
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"[[models]]: {count} models have the name {name!r}: give each its own "
                "server.served_model_names"
            )
    for section, key in _OWN_PLACES:
        places = [getattr(getattr(each, section), key) for each in configs]
        if len(given := [place for place in places if place]) > len(set(given)):
            raise ConfigError(f"[[models]]: each model needs a {section}.{key} of its own")
    if any(each.parallel.executor == "ray" for each in configs):
        raise ConfigError(
            "[[models]] need parallel.executor = 'multiprocess': Ray lends no GPU "
            "to a model while another one sleeps on it"
        )


def divide_by_gpus(configs: Sequence[Config]) -> list[list[int]]:
    """Returns the numbers of models, those together that have a GPU in common, also by way of
    others; ascending."""
    divided: list[tuple[set[int], list[int]]] = []
    for number, config in enumerate(configs):
        gpus, numbers = set(config.parallel.gpus), [number]
        for other in [each for each in divided if not gpus.isdisjoint(each[0])]:
            divided.remove(other)
            gpus, numbers = gpus | other[0], sorted(numbers + other[1])
        divided.append((gpus, numbers))
    return sorted(numbers for _, numbers in divided)


def describe_keys() -> Iterator[tuple[str, str, str, str]]:
    """Yields (dotted key, type, default, documentation) of every key, in order."""
    for section in fields(Config):
        section_type = hints_of(Config)[section.name]
        for item in fields(section_type):
            yield (
                f"{section.name}.{item.name}",
                type_name(hints_of(section_type)[item.name]),
                default_text(item),
                item.metadata["doc"],
            )


def _drop_names(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Removes the file's names of the served model where the overrides name another model: they
    are names of the file's own."""
    model, server = tree.get("model"), tree.get("server")
    if not isinstance(model, dict) or not isinstance(server, dict):
        return
    if "path" in model and overrides.get("model.path", model["path"]) != model["path"]:
        server.pop("served_model_names", None)


def parse_override(text: str) -> tuple[str, Any]:
    """Returns the key and the value of `section.key=value`. Raises `ConfigError`."""
    dotted, equals, raw = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not an override: write section.key=value")
    try:
        return dotted.strip(), tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:  # a bare string: no quotes needed on a command line
        return dotted.strip(), raw.strip()


def _build(cls: type, tree: Mapping[str, Any], path: str) -> Any:
    """Makes dataclass `cls` from the TOML table `tree`; `path` is the table's dotted name, empty
    for the whole file."""
    hints, keys = hints_of(cls), {item.name: item for item in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = f"{path}.{name}" if path else name
        if name not in hints:
            known = [*([] if path else hints), *(k for k, *_ in describe_keys())]
            raise ConfigError(
                f"unknown {'key' if path else 'section'} {dotted!r}{nearest(dotted, known)}"
            )
        if is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(f"{dotted!r} is a section, not a value")
            values[name] = _build(cast(type, hints[name]), value, dotted)
        else:
            values[name] = check_value(hints[name], value, dotted, keys[name].metadata)
    for name, item in keys.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{f'{path}.{name}' if path else f'{name}.path'!r} must be given")
    return cls(**values)


def _check_combinations(config: Config) -> None:
    """Checks what involves several keys, and the default sampling. Raises `ConfigError` naming the
    key."""
    model, server, parallel = config.model, config.server, config.parallel
    _check_server(server)
    if parallel.executor == "inline":
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ConfigError(
                    f"parallel.executor = 'inline' runs one worker: use "
                    f"'multiprocess' with parallel.{name} above 1"
                )
    if not _DEVICE.fullmatch(parallel.device):
        raise ConfigError(
            "parallel.device must be 'auto', 'cpu' or 'cuda', or one of these with the number of a "
            f"GPU, as in 'cuda:2', not {parallel.device!r}"
        )
    if parallel.gpus.start and parallel.executor == "ray":
        raise ConfigError(
            "parallel.device has a number: with parallel.executor = 'ray' Ray lends the GPUs"
        )
    _check_experts(parallel)
    _check_store(config)
    if model.chat_template is not None and not model.has_tokenizer:
        raise ConfigError("model.chat_template has no effect with model.tokenizer = 'none'")
    _check_tracing(config.tracing)
    for source in config.media.allowed_sources:
        if not source or (not source.startswith("/") and any(mark in source for mark in "/~")):
            raise ConfigError(
                f"media.allowed_sources: {source!r} is neither a host, such as 'example.org', nor "
                "the absolute path of a folder"
            )
    try:
        SamplingParams(**model.sampling)
    except RequestError as error:
        raise ConfigError(f"model.sampling.{error.param}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"model.sampling: {error}") from error


_DEVICE = re.compile(r"(auto|cpu|cuda)(:[0-9]{1,4})?")
#: What a browser sends as `Origin`, and names and addresses as they are in `Host` without a port.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#]+")
_HOST = re.compile(r"\*|(\*\.)?[^\s/:*\[\]]+|\[?[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*\]?", re.I)


def _check_server(server: ServerConfig) -> None:
    """Checks what no request could match. Raises `ConfigError` naming the key."""
    if len(server.tls_files) > 2:
        raise ConfigError("server.tls_files: the certificate and its key are in one file or in two")
    if "" in server.served_model_names:
        raise ConfigError("server.served_model_names: a name is empty")
    for origin in server.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"server.cors_origins: {origin!r} is no origin: write scheme and host in lower "
                "case and no path, such as https://example.org"
            )
    for host in server.allowed_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"server.allowed_hosts: {host!r} is no name of a host: write it without scheme, "
                "port and path, such as example.org or *.example.org"
            )


def _check_store(config: Config) -> None:
    """Checks what keeps KV blocks beyond the device. Raises `ConfigError` naming the key."""
    cache = config.cache
    if cache.peer_address is not None:
        if not cache.peer_key_file:
            raise ConfigError("cache.peer_address needs cache.peer_key_file")
        try:
            host, _ = parse_address(cache.peer_address)
        except ValueError as error:
            raise ConfigError(f"cache.peer_address: {error}") from error
        if host in ("0.0.0.0", "::"):
            raise ConfigError(
                "cache.peer_address is what other servers connect to: name one address"
            )
    if not cache.host_bytes and not cache.disk_path:
        return
    if not cache.enable_prefix_caching:
        raise ConfigError("cache.host_bytes needs cache.enable_prefix_caching = true")
    if cache.disk_path and not cache.host_bytes:
        raise ConfigError("cache.disk_path needs cache.host_bytes: blocks cross memory of the host")


def _check_experts(parallel: ParallelConfig) -> None:
    """Checks which ranks are to have which experts. Raises `ConfigError` naming the key."""
    if parallel.data_parallel_attention:
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                "parallel.expert_parallel between engines needs parallel.pipeline_parallel_size = 1"
            )
        if parallel.executor == "ray":
            raise ConfigError(
                "parallel.expert_parallel between engines needs parallel.executor = "
                "'multiprocess': 'ray' does not bring the ranks of several engines together"
            )
    elif parallel.expert_parallel and parallel.tensor_parallel_size == 1:
        raise ConfigError(
            "parallel.expert_parallel needs parallel.tensor_parallel_size above 1, or "
            "parallel.data_parallel_size"
        )


def _check_tracing(tracing: TracingConfig) -> None:
    """Checks the collector's URL. Raises `ConfigError`, which does not show it: it may hold
    secrets."""
    if tracing.endpoint:
        try:
            url = urlsplit(tracing.endpoint)
            is_usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ConfigError("tracing.endpoint must be a URL, such as http://localhost:4318")
