"""API keys: the file's formats, what is wrong with one, and that no message shows a key."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from aioinfer.__main__ import main
from aioinfer.api.http.keys import ANONYMOUS, ApiKey, ApiKeys
from aioinfer.api.http.keys import main as make_key
from aioinfer.config import load_config
from aioinfer.errors import ConfigError


def load(file: Path | None, text: str = "", **settings: Any) -> ApiKeys:
    if file is not None:
        file.write_text(text)
        settings["server.api_keys"] = str(file)
    config = load_config(None, {"model.path": "x"} | settings)
    return ApiKeys.load(config.server)


def found(keys: ApiKeys, key: str) -> str | None:
    key_found = keys.find(f"Bearer {key}")
    return None if key_found is None else key_found.name


def hexadecimal(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def test_tables_of_a_file(tmp_path: Path) -> None:
    text = f"""# comment
[alice]
sha256 = "{hexadecimal("sk-alice")}"
requests_per_minute = 60
weight = 2
["bob@example.org"]
sha256 = ["{hexadecimal("sk-old")}", "{hexadecimal("sk-new").upper()}"]
[carol]
key = "sk-carol"  # in clear
min_priority = 3
"""
    keys = load(tmp_path / "keys", text)
    assert [key.name for key in keys.all] == ["alice", "bob@example.org", "carol"]
    names = {
        "sk-alice": "alice", "sk-old": "bob@example.org", "sk-new": "bob@example.org",
        "sk-carol": "carol",
    }  # fmt: skip
    assert {key: found(keys, key) for key in names} == names
    assert keys.all[0] == ApiKey("alice", requests_per_minute=60, weight=2.0)
    assert keys.all[2].min_priority == 3
    for wrong in ("", "sk-alic", "alice", hexadecimal("sk-alice"), "[alice]"):
        assert found(keys, wrong) is None
    assert keys.find("Basic sk-alice") is None
    assert keys.find(None) is None


def test_a_key_has_the_configured_limits_unless_it_has_its_own(tmp_path: Path) -> None:
    text = f"""[own]
sha256 = "{hexadecimal("a")}"
tokens_per_minute = 5
min_priority = -1
[lifted]
sha256 = "{hexadecimal("b")}"
requests_per_minute = 0
tokens_per_minute = 0
max_concurrent_requests = 0
"""
    defaults = {
        "server.limits.requests_per_minute": 7,
        "server.limits.tokens_per_minute": 8,
        "server.limits.max_concurrent_requests": 9,
    }
    plain = load(None, **defaults, **{"server.api_keys": ["plain"]})
    assert plain.all == [ApiKey("key-1", 7, 8, 9)]
    assert load(tmp_path / "keys", text, **defaults).all == [
        ApiKey("own", 7, 5, 9, min_priority=-1),
        ApiKey("lifted", None, None, None),
    ]


def test_without_keys_there_is_one_name_for_all_requests() -> None:
    keys = load(None, **{"server.limits.requests_per_minute": 7})
    assert keys.all == [ApiKey(ANONYMOUS, 7)]
    assert found(keys, "anything") == ANONYMOUS
    assert keys.find(None) is keys.all[0]


def test_a_configured_key_may_stand_twice() -> None:
    keys = load(None, **{"server.api_keys": ["same", "same", "other"]})
    assert [key.name for key in keys.all] == ["key-1", "key-2"]
    assert found(keys, "other") == "key-2"


DIGEST = hexadecimal("sk-secret")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# keys\n[a]\nsk-secret\n", "not TOML at line 3"),
        ("sk-secret\n", "not TOML at line 1"),
        ('sk-secret = "a"', r"tables such as \[alice\]"),
        (f'[a]\nname = "b"\nsha256 = "{DIGEST}"', "without a name"),
        ('[a]\nkey = "sk-secret', "not TOML at"),
        ('[a]\nkey = "sk-secret"\n[a]\nkey = "sk-other"', "not TOML at"),
        ("[a]\nweight = 1", r"\[a\] needs either key or sha256"),
        (f'[a]\nkey = "sk-secret"\nsha256 = "{DIGEST}"', r"\[a\] needs either key or sha256"),
        ('[a]\nkey = "sk secret"', "without blanks"),
        ('[a]\nsha256 = "sk-secret"', r"sha256"),
        (f'[a]\nsha256 = "{DIGEST}"\nrequests_per_minute = "many"', "requests_per_minute"),
        (f'[a]\nsha256 = "{DIGEST}"\nrequests_per_minute = -1', "requests_per_minute"),
        (f'[a]\nsha256 = "{DIGEST}"\nweight = 0', "weight"),
        (f'[a]\nsha256 = "{DIGEST}"\nweigth = 1', "'weigth', and may have .*weight"),
        (f'[a]\nsha256 = "{DIGEST}"\nlimits = 1', "may have requests_per_minute"),
        (f'["a b"]\nsha256 = "{DIGEST}"', "names are"),
        (f'["a\\nb"]\nsha256 = "{DIGEST}"', "names are"),
        (f'[anonymous]\nsha256 = "{DIGEST}"', "names are"),
        (f'[a]\nsha256 = "{DIGEST}"\n[b]\nkey = "sk-secret"', "a key twice"),
    ],
)
def test_what_is_wrong_is_named_without_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "keys", text)
    assert "server.api_keys" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert DIGEST not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_makes_a_key_that_the_file_takes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aioinfer.api.http.keys"]
    made = subprocess.run([*command, "a.b"], capture_output=True, text=True, check=True, timeout=60)
    key = made.stderr.splitlines()[-1]
    assert key.startswith("sk-")
    assert len(key) > 40
    assert key not in made.stdout
    keys = load(tmp_path / "keys", made.stdout)
    assert found(keys, key) == "a.b"
    for arguments in ([], ["two words"], ["a", "b"]):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert ended.stderr.startswith("usage:")


def test_the_digests_are_all_that_is_kept() -> None:
    keys = load(None, **{"server.api_keys": ["sk-secret"]})
    assert "sk-secret" not in f"{vars(keys)} {keys.all}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"), (b"", "it holds no key"), (b"# only\n", "it holds no key"),
        (b"\xff\xfe", "not text"), (b'[a]\nkey = "sk-two words"', "without blanks"),
    ],
)  # fmt: skip
def test_a_wrong_key_file(
    tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--set", f"server.api_keys={file}"]) == 2
    shown = capsys.readouterr().err
    assert "server.api_keys" in shown
    assert message in shown
    assert "sk-" not in shown


@pytest.mark.parametrize("key", ["", "sk two", "sk-ü", "sk\n"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys") as caught:
        ApiKeys.load(load_config(None, {"model.path": "x", "server.api_keys": [key]}).server)
    assert "sk" not in str(caught.value)


def test_keys_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, {"model.path": "x", "server.api_keys": ["sk-secret"]})
    assert "sk-secret" not in f"{config} {config.server!r} {vars(ApiKeys.load(config.server))}"
    for value in ('["sk-secret", 5]', '{"sk-secret" = 1}'):
        assert main(["--set", "model.path=x", "--set", f"server.api_keys={value}"]) == 2
        shown = capsys.readouterr().err
        assert "server.api_keys must be list of string or string" in shown
        assert "sk-secret" not in shown
    for value in ("sk-secret", "[sk-secret"):  # names of files
        with pytest.raises(ConfigError, match=r"server\.api_keys: No such file") as caught:
            load(None, **{"server.api_keys": value})
        assert "sk-secret" not in str(caught.value)


def test_admin_keys(tmp_path: Path) -> None:
    """One of the file is a key like others; `server.admin_key` opens admin endpoints alone."""
    text = '[alice]\nkey = "a"\nadmin = true\n[bob]\nkey = "b"\n'
    keys = load(tmp_path / "keys", text, **{"server.admin_key": "c"})
    assert [keys.is_admin(f"Bearer {key}") for key in "abc"] == [True, False, True]
    assert [found(keys, key) for key in "abc"] == ["alice", "bob", None]
    assert not keys.is_admin("a")
    assert not keys.is_admin(None)
    without = load(None)
    assert not without.has_admin
    assert not without.is_admin("Bearer ")
    alone = load(None, **{"server.admin_key": "c"})
    assert alone.has_admin
    assert found(alone, "anything") == ANONYMOUS
    with pytest.raises(ConfigError, match=r"server\.admin_key") as caught:
        load(None, **{"server.admin_key": "se cret"})
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a b"], ["alice", "bob"], [ANONYMOUS]])
def test_what_is_no_name_gets_no_key(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_key(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""  # it goes to the file
    assert "names are 1 to 64 letters, digits and any of ._@-" in written.err
