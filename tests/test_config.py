"""The configuration: what is read, what is refused and with which hint, and that every key is
documented."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import document_keys
from aioinfer.__main__ import main
from aioinfer.config import (
    Config,
    ModelConfig,
    ParallelConfig,
    describe_keys,
    divide_by_gpus,
    load_config,
    load_models,
)
from aioinfer.errors import ConfigError

ROOT = Path(__file__).parent.parent
MODEL = "model.path=some/model"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text, "utf-8")
    return file


# ---------------------------------------------------------------- what is read


def test_only_the_model_must_be_given() -> None:
    config = load_config(overrides=[MODEL])
    assert config.model.path == "some/model"
    assert config.served_model_names == ["some/model"]
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.model.max_model_len is None
    with pytest.raises(ConfigError, match=r"'model\.path' must be given"):
        load_config(overrides=["server.port=1"])
    with pytest.raises(ConfigError, match=r"'model\.path' must be given"):
        load_config(overrides=["model.seed=1"])


def test_a_file_and_what_lies_over_it(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [model]
        path = "a/b"
        max_model_len = 100
        [cache]
        cpu_memory_gib = 3            # a whole number serves as a number
        [scheduler]
        max_num_seqs = 9
        [server]
        served_model_names = ["x", "y"]
        """,
    )
    config = load_config(file, ["model.max_model_len=200", "model.path=c", "server.port = 0"])
    assert config.model.path == "c"
    assert config.model.max_model_len == 200
    assert config.cache.cpu_memory_gib == 3.0
    assert isinstance(config.cache.cpu_memory_gib, float)
    assert config.scheduler.max_num_seqs == 9
    assert config.served_model_names == ["c"], "the file names its own model"
    assert config.server.port == 0
    assert load_config(file, {"cache.num_blocks": 7, "model.tokenizer": None}).cache.num_blocks == 7


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("parallel.cuda_graphs=false", "parallel", "cuda_graphs", False),
        ("cache.gpu_memory_utilization=0.5", "cache", "gpu_memory_utilization", 0.5),
        ('server.served_model_names=["a", "b"]', "server", "served_model_names", ["a", "b"]),
        ("model.dtype=float32", "model", "dtype", "float32"),
        ('model.dtype="float32"', "model", "dtype", "float32"),
        ("model.tokenizer=/a folder/with=sign", "model", "tokenizer", "/a folder/with=sign"),
        ("model.hf_overrides={a = {b = [1]}}", "model", "hf_overrides", {"a": {"b": [1]}}),
    ],
)
def test_overrides_in_toml_or_as_bare_strings(
    override: str, section: str, key: str, value: Any
) -> None:
    config = load_config(overrides=[MODEL, override])
    assert getattr(getattr(config, section), key) == value


def test_derived_values() -> None:
    for key, cap in (
        ("scheduler.max_num_batched_tokens=100", 25),
        ("scheduler.max_num_batched_tokens=2", 1),
    ):
        config = load_config(overrides=[MODEL, key])
        assert config.prefill_cap == cap
        assert config.without_streams().prefill_cap == config.scheduler.max_num_batched_tokens
        assert not config.without_streams().paces_prefill
    assert not load_config(overrides=[MODEL]).paces_prefill
    for key in ("scheduler.target_itl_ms=20", "scheduler.target_itl_ms=0"):
        config = load_config(overrides=[MODEL, key])
        assert config.paces_prefill
        assert config.prefill_cap == 8192
        stages = "parallel.pipeline_parallel_size=2"
        config = load_config(overrides=[MODEL, stages, key])
        assert (config.paces_prefill, config.prefill_cap) == (False, 2048)
    few = [MODEL, "scheduler.max_num_seqs=4", "speculation.max_draft_tokens=3"]
    for budget, most in ((8, 16), (64, 64)):
        config = load_config(overrides=[*few, f"scheduler.max_num_batched_tokens={budget}"])
        assert (config.max_sampled_rows, config.max_step_tokens) == (16, most)


def test_fields_cannot_be_assigned() -> None:
    config = load_config(overrides=[MODEL])
    for section in (config, config.model, config.chat, config.server):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, dataclasses.fields(section)[0].name, "other")


def test_configurations_do_not_share_their_default_lists() -> None:
    config = load_config(overrides=[MODEL])
    config.server.served_model_names.append("x")
    assert load_config(overrides=[MODEL]).server.served_model_names == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.name
)
def test_every_example_loads_with_a_served_name_and_the_default_block_size(file: Path) -> None:
    for config in load_models(file):
        assert config.server.served_model_names
        assert config.cache.block_size is None, "the default suits the kernels of each device"


SEVERAL = """
cache.num_blocks = 7
scheduler.max_num_batched_tokens = 64
[[models]]
model.path = "a"
[[models]]
model.path = "b"
server.served_model_names = ["b", "c"]
cache.block_size = 4
scheduler.max_num_batched_tokens = 32
"""


def test_several_models_share_what_a_file_says_and_differ_in_their_tables(tmp_path: Path) -> None:
    file = write(tmp_path, SEVERAL)
    first, second = load_models(file, ["scheduler.max_num_seqs=3"])
    assert [first.served_model_names, second.served_model_names] == [["a"], ["b", "c"]]
    assert [each.cache.num_blocks for each in (first, second)] == [7, 7]
    assert [each.scheduler.max_num_seqs for each in (first, second)] == [3, 3]
    assert [each.scheduler.max_num_batched_tokens for each in (first, second)] == [64, 32]
    assert (first.cache.block_size, second.cache.block_size) == (None, 4)
    assert [each.model.sleep_mode for each in (first, second)] == [True, True]
    with pytest.raises(ConfigError, match=r"several \[\[models\]\], which a server alone"):
        load_config(file)
    alone = load_config(write(tmp_path, '[[models]]\nmodel.path = "a"\ncache.block_size = 4'))
    assert (alone.cache.block_size, alone.model.sleep_mode) == (4, False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("cache.blok_size = 4", r"number 2: unknown key 'cache\.blok_size' \(did you mean"),
        ("server.port = 1", r"number 2: server\.port is for the whole server: give it once"),
        ("logging.format = 'json'", r"logging\.format is for the whole server"),
        ("name = 'x'", r"number 2: unknown section 'name'"),
        ("lora.adapters = { a = 'x' }", r"2 models have the name 'a': give each its own"),
        ("[[models]]\nserver.served_model_names = ['x']", r"number 3: 'model\.path' must be given"),
        ("parallel.executor = 'ray'", r"need parallel\.executor = 'multiprocess'"),
    ],
)
def test_tables_of_models_that_are_wrong(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_models(write(tmp_path, SEVERAL + more))


@pytest.mark.parametrize(
    ("shared", "override", "message"),
    [
        ("server.prot = 1", "", r"^unknown key 'server\.prot' \(did you mean"),
        ("", "server.prot=1", r"^unknown key 'server\.prot' \(did you mean"),
        ("tracing.endpoint = 'x'", "", r"^tracing\.endpoint must be a URL"),
        ("cache.disk_path = 'x'", "", r"^cache\.disk_path needs cache\.host_bytes"),
    ],
)
def test_what_is_wrong_for_all_models_is_not_said_to_be_of_one(
    tmp_path: Path, shared: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_models(write(tmp_path, f"{shared}\n{SEVERAL}"), [override] if override else [])


def test_models_with_a_gpu_in_common_are_together() -> None:
    def parts(*gpus: tuple[int, int]) -> list[list[int]]:
        given = (
            ParallelConfig(device=f"cpu:{first}", tensor_parallel_size=count)
            for first, count in gpus
        )
        return divide_by_gpus(
            [Config(model=ModelConfig(path="x"), parallel=each) for each in given]
        )

    assert parts((0, 1), (0, 1)) == [[0, 1]]
    assert parts((2, 2), (0, 2), (3, 1), (1, 1)) == [[0, 2], [1, 3]]
    assert parts((0, 2), (2, 2), (4, 1), (1, 2)) == [[0, 1, 3], [2]]  # by way of the last one
    settings = {"model.path": "x", "parallel.device": "cuda:1"}
    with pytest.raises(ConfigError, match=r"parallel.device has a number: .* Ray lends the GPUs"):
        load_config(None, settings | {"parallel.executor": "ray"})


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", ":1", "cuda:0\n"])
def test_devices_have_names_and_numbers(device: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.device must be 'auto', 'cpu' or 'cuda'"):
        load_config(None, {"model.path": "x", "parallel.device": device})


def test_models_do_not_share_a_place(tmp_path: Path) -> None:
    shared = '\ncache.host_bytes = 1\ncache.disk_path = "x"\n'
    with pytest.raises(ConfigError, match=r"each model needs a cache\.disk_path of its own"):
        load_models(write(tmp_path, shared + SEVERAL))
    with pytest.raises(ConfigError, match=r"models must be tables: \[\[models\]\]"):
        load_models(write(tmp_path, 'models = ["a"]'))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.pat=x", r"unknown key 'model\.pat' \(did you mean 'model\.path'\?\)"),
        ("scheduler.max_num_seq=1", r"did you mean 'scheduler\.max_num_seqs'"),
        # the right key in the wrong section
        ("model.max_num_seqs=1", r"did you mean 'scheduler\.max_num_seqs'"),
        ("cache.gpu_memory_utilisation=0.5", r"did you mean 'cache\.gpu_memory_utilization'"),
        ("scheduler.policy=fcfs", r"unknown key 'scheduler\.policy'"),
        ("schduler.max_num_seqs=1", r"unknown section 'schduler' \(did you mean 'scheduler'\?\)"),
        # nothing is near
        ("server.qwertz=1", r"unknown key 'server\.qwertz'$"),
        ("server.limits.xyzzy=1", r"unknown key 'server\.limits\.xyzzy'$"),
        ("zz.qq=1", r"unknown section 'zz'$"),
        ("sampling.top_p=1", r"unknown section 'sampling' \(did you mean 'model\.sampling'\?\)"),
        ("model.sampling.topp=1", r"did you mean 'model\.sampling\.top_p'"),
        ("server.limits.tokens_per_minute=x", r"tokens_per_minute must be integer, not 'x'"),
        ("server.tls_key=key.pem", r"did you mean 'server\.tls_files'"),
        ('media.allowed_sources=["./a"]', r"allowed_sources: '\./a' is neither a host"),
        ('media.allowed_sources=["https://a.org"]', r"nor the absolute path of a folder"),
        ('server.cors_origins=["https://a.org/"]', r"cors_origins: 'https://a\.org/' is no origin"),
        ('server.cors_origins=["a.org"]', r"write scheme and host"),
        ('server.allowed_hosts=["a:80"]', r"allowed_hosts: 'a:80' is no name .* without .*port"),
        ('server.allowed_hosts=["https://a"]', r"without scheme"),
        ('server.allowed_hosts=[""]', r"'' is no name"),
        ('server.served_model_names=[""]', r"served_model_names: a name is empty"),
        ("port=80", r"write section\.key \(did you mean 'server\.port'\?\)"),
        ("server.port", r"'server\.port' is not an override"),
        ("server.port=high", r"server\.port must be integer, not 'high'"),
        ("server.port=80.0", r"server\.port must be integer, not 80\.0"),
        ("server.port=true", r"server\.port must be integer, not True"),
        ("cache.cpu_memory_gib=true", r"cache\.cpu_memory_gib must be number"),
        ("parallel.cuda_graphs=1", r"parallel\.cuda_graphs must be boolean, not 1"),
        ("model.max_model_len=long", r"model\.max_model_len must be integer, not 'long'"),
        ("model.path=[1]", r"model\.path must be string"),
        (
            "server.served_model_names=x",
            r"server\.served_model_names must be list of string, not "
            r"'x'",
        ),
        ("server.served_model_names=[1]", r"server\.served_model_names must be string, not 1"),
        (
            "model.dtype=float8",
            r"model\.dtype must be 'auto' \| .*not 'float8' \(did you mean "
            r"'float",
        ),
    ],
)
def test_wrong_keys_and_types_name_the_right_ones(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[MODEL, override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.max_model_len=0", "at least 1"),
        ("cache.block_size=0", "at least 1"),
        ("cache.num_blocks=-1", "at least 1"),
        ("cache.cpu_memory_gib=0", "above 0"),
        ("cache.gpu_memory_utilization=1.5", "above 0 and at most 1"),
        ("cache.gpu_memory_utilization=0", "above 0 and at most 1"),
        ("scheduler.max_num_seqs=0", "at least 1"),
        ("scheduler.max_num_batched_tokens=0", "at least 1"),
        ("parallel.tensor_parallel_size=0", "at least 1"),
        ("parallel.cpu_threads=0", "at least 1"),
        ("server.port=65536", "at least 0 and at most 65535"),
        ("server.port=-1", "at least 0 and at most 65535"),
        ("server.request_timeout_s=0", "above 0"),
        ("server.shutdown_timeout_s=-1", "at least 0"),
        ("scheduler.max_waiting_requests=-1", "at least 0"),
        ("parallel.data_parallel_size=0", "at least 1"),
        ("cache.cpu_memory_gib=nan", "finite"),
        ("model.sampling.temperature=-0.1", "temperature must be"),
        ("model.sampling.temperature=nan", "temperature must be"),
        ("model.sampling.top_k=-2", "top_k must be"),
        ("model.sampling.top_p=0", "top_p must be"),
        ("model.sampling.max_tokens=0", "max_tokens must be"),
    ],
)
def test_values_out_of_range_name_their_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(overrides=[MODEL, override])
    assert override.partition("=")[0] in str(caught.value)


def test_the_smallest_and_largest_values_that_are_allowed() -> None:
    allowed = {
        "cache.gpu_memory_utilization": 1, "scheduler.max_waiting_requests": 0,
        "scheduler.max_num_seqs": 1, "server.port": 65535, "server.shutdown_timeout_s": 0,
        "server.limits": {"requests_per_minute": 1},
        "model.sampling": {"temperature": 0, "top_k": -1, "top_p": 1},
    }  # fmt: skip
    config = load_config(overrides={"model.path": "x", **allowed})
    for dotted, value in allowed.items():
        section, _, name = dotted.partition(".")
        assert getattr(getattr(config, section), name) == value


def test_default_sampling_holds_what_is_given_and_no_more(tmp_path: Path) -> None:
    assert load_config(overrides=[MODEL]).model.sampling == {}
    file = write(tmp_path, "[model]\npath = 'x'\n[model.sampling]\ntemperature = 0\ntop_k = 40")
    config = load_config(file, ["model.sampling.max_tokens=100"])
    assert config.model.sampling == {"temperature": 0, "top_k": 40, "max_tokens": 100}


def test_a_template_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template has no effect"):
        load_config(overrides=[MODEL, "model.tokenizer=none", "model.chat_template=x"])


def test_switches_that_only_some_need_are_off_by_default() -> None:
    config = load_config(overrides=[MODEL])
    assert (config.model.trust_remote_code, config.model.has_tokenizer) == (False, True)
    assert config.parallel.cuda_graphs


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_an_inline_executor_is_one_worker(kind: str) -> None:
    name = f"parallel.{kind}_parallel_size"
    with pytest.raises(ConfigError, match=rf"parallel\.executor.* with {re.escape(name)} above 1"):
        load_config(overrides=[MODEL, "parallel.executor=inline", f"{name}=2"])


def test_experts_are_placed_on_several_ranks() -> None:
    wanted = [MODEL, "parallel.expert_parallel=true"]
    with pytest.raises(ConfigError, match=r"needs parallel\.tensor_parallel_size above 1"):
        load_config(overrides=wanted)
    with pytest.raises(ConfigError, match=r"or parallel\.data_parallel_size"):
        load_config(overrides=[*wanted, "parallel.pipeline_parallel_size=2"])
    config = load_config(overrides=[*wanted, "parallel.tensor_parallel_size=2"])
    assert config.parallel.expert_parallel
    placed = [MODEL, "parallel.expert_parallel=p.json", "parallel.tensor_parallel_size=2"]
    assert load_config(overrides=placed).parallel.expert_parallel == "p.json"
    with pytest.raises(ConfigError, match=r"expert_parallel must be boolean or string, not 2"):
        load_config(overrides=[MODEL, "parallel.expert_parallel=2"])


def test_engines_share_experts() -> None:
    wanted = [MODEL, "parallel.expert_parallel=true", "parallel.data_parallel_size=2"]
    assert load_config(overrides=wanted).parallel.data_parallel_attention
    ranks = load_config(overrides=[*wanted, "parallel.tensor_parallel_size=2"])
    assert not ranks.parallel.data_parallel_attention
    for setting, message in (
        ("pipeline_parallel_size=2", r"needs parallel\.pipeline_parallel_size = 1"),
        ("executor=ray", r"needs parallel\.executor = 'multiprocess'"),
    ):
        with pytest.raises(ConfigError, match=f"between engines {message}"):
            load_config(overrides=[*wanted, f"parallel.{setting}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path = 'x'", r"unknown section 'path'"),
        ("model = 'x'", r"'model' is a section, not a value"),
        (
            "[model]\npath = 'x'\n[modle]\nseed = 1",
            r"unknown section 'modle' \(did you mean "
            r"'model'\?\)",
        ),
        ("[model\npath", r"config\.toml: "),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_an_override_does_not_hide_a_section_that_is_a_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[server\] must be a section"):
        load_config(write(tmp_path, "server = 1"), ["server.port=1"])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: .*No such file"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b"[model]\npath = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml: "):
        load_config(tmp_path / "latin.toml")


# ---------------------------------------------------------------- documentation


def test_every_key_is_described_once() -> None:
    described = list(describe_keys())
    expected = [
        f"{section.name}.{key.name}"
        for section in dataclasses.fields(Config)
        for key in dataclasses.fields(getattr(load_config(overrides=[MODEL]), section.name))
    ]
    assert [dotted for dotted, *_ in described] == expected
    docs = [doc for *_, doc in described]
    assert all(doc.endswith((".", ")")) and len(doc) > 10 for doc in docs)
    assert len(set(docs)) == len(docs)
    by_key = {dotted: (kind, default) for dotted, kind, default, _ in described}
    assert by_key["model.path"] == ("string", "required")
    assert by_key["cache.num_blocks"] == ("integer", "")
    assert by_key["server.port"] == ("integer", "8000")
    assert by_key["server.served_model_names"] == ("list of string", "[]")


def test_the_page_is_up_to_date() -> None:
    assert document_keys.PAGE.read_text("utf-8") == document_keys.render(), "run `make docs`"
    assert '| `format` | "text" \\| "json" | `"text"` |' in document_keys.render()


def test_the_command_line_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys"]) == 0
    output = capsys.readouterr().out
    for dotted, *_, doc in describe_keys():
        assert dotted in output
        assert doc in output


def test_a_terminal_gets_keys_in_lines_that_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--keys", "target_itl_ms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    docs = {dotted: doc for dotted, *_, doc in describe_keys()}
    assert docs["scheduler.target_itl_ms"] in " ".join(" ".join(lines).split())


def test_a_file_names_its_own_model_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text('model.path = "org/large"\nserver.served_model_names = ["large"]\n')
    for overrides, names in (
        ({}, ["large"]),
        ({"model.path": "org/large", "server.port": 1}, ["large"]),
        ({"model.path": "org/small"}, ["org/small"]),
        ({"model.path": "org/small", "server.served_model_names": ["small"]}, ["small"]),
    ):
        assert load_config(file, overrides).served_model_names == names
    assert load_config(file, ["model.path=org/small"]).served_model_names == ["org/small"]


def test_the_command_line_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(tmp_path / "no.toml")]) == 2
    assert "no.toml" in capsys.readouterr().err
    assert main(["--set", MODEL, "--set", "server.prt=1"]) == 2
    assert "did you mean 'server.port'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "endpoint",
    ["s3cret", "s3cret:4318", "ftp://s3cret", "http://", "http://s3cret:99999", "//s3cret"],
)
def test_a_collector_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint must be a URL") as error:
        load_config(overrides={"model.path": "x", "tracing.endpoint": endpoint})
    assert "s3cret" not in str(error.value)


def test_a_collector() -> None:
    url = "https://user:s3cret@[::1]:4318/otlp/v1/traces"
    assert load_config(overrides=[MODEL, f"tracing.endpoint={url}"]).tracing.endpoint == url
    assert not load_config(overrides=[MODEL, "tracing.endpoint="]).tracing.endpoint, "off"


def test_origins_and_hosts() -> None:
    given: dict[str, list[str]] = {
        "server.cors_origins": ["*", "null", "https://a.org:8", "chrome-extension://a", "http://[::1]"],
        "server.allowed_hosts": ["*", "*.a.org", "A_b", "127.0.0.1", "::1", "[fe80::1]", "ü.de"],
    }  # fmt: skip
    server = load_config(overrides={"model.path": "x"} | given).server
    assert [server.cors_origins, server.allowed_hosts] == [*given.values()]
