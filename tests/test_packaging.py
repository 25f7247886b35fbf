"""What pyproject.toml and the lock files state, compared with the tree, and the wheel that is built
from what the Dockerfile copies."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from packaging.metadata import Metadata

import aioinfer
import check_dockerfile
import lock

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def locked(file: str) -> dict[str, str]:
    """Returns the versions in a lock file by package, each of which is there once."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert len({name for name, _ in pins}) == len(pins)
    return dict(pins)


def test_every_package_of_the_tree_is_listed() -> None:
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "aioinfer").rglob("*.py")}
    elsewhere = {"aioinfer.kernels", "aioinfer.scripts", "aioinfer.scripts.benchlib"}
    assert {".".join(folder.parts) for folder in folders} | elsewhere == set(
        PROJECT["tool"]["setuptools"]["packages"]
    )


def test_aiohttp_is_pinned_to_a_version_that_has_the_private_members_that_are_used() -> None:
    """`api.http.connections` reads the queue of parsed heads, and `api.batch.batches` calls the
    handler of an application that may be inside another. Neither has a public name."""
    (requirement,) = (r for r in PROJECT["project"]["dependencies"] if r.startswith("aiohttp"))
    bounds = re.fullmatch(r"aiohttp>=3\.(\d+),<3\.(\d+)", requirement)
    assert bounds is not None
    assert int(bounds[2]) == int(bounds[1]) + 1
    installed = version("aiohttp").split(".")
    assert (
        installed[:2] == locked("requirements.lock")["aiohttp"].split(".")[:2] == ["3", bounds[1]]
    )
    assert "_messages" in web.RequestHandler.__slots__
    assert list(inspect.signature(web.Application._handle).parameters) == ["self", "request"]
    private = re.compile(r"\bapp\._handle\b|\bself\._messages\b")
    files = {
        file.name
        for file in (ROOT / "aioinfer").rglob("*.py")
        if "aiohttp" in (text := file.read_text("utf-8")) and private.search(text)
    }
    assert files == {"batches.py", "connections.py"}


def test_every_data_file_of_the_tree_is_listed() -> None:
    """setuptools installs modules of the listed packages, and other files only as package data."""
    listed = {
        file
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
        if file.is_file()
    }
    data = {
        file
        for file in (ROOT / "aioinfer").rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }
    assert data == listed


def test_kernels_is_no_package_of_its_own() -> None:
    """transformers looks for an importable PyPI package of that name, and must not find this folder
    instead."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels").is_dir()


def test_the_lock_files_hold_every_dependency_once() -> None:
    run_time, test = locked("requirements.lock"), locked("requirements-test.lock")
    assert not run_time.keys() & test.keys()
    for requirements, pins in (
        (PROJECT["project"]["dependencies"], run_time),
        (PROJECT["dependency-groups"]["test"], run_time | test),
    ):
        for requirement in requirements:
            match = re.match(r"[\w.-]+", requirement)
            assert match is not None
            assert lock.normalize(match.group()) in pins, (
                f"{requirement} is not locked: run `make lock`"
            )


def test_the_scripts_import_what_the_server_needs_and_nothing_else() -> None:
    """They run in the environment of `make serve`. Those of Ray need its extra, the checks of the
    source the packages of the tests, and the benchmarks of kernels the tests' references."""
    providers = packages_distributions()
    own = {file.stem for file in (ROOT / "scripts").glob("*.py")}
    own |= {"aioinfer", "benchlib", "bench_features", "ray", "tests"}
    files = [file for file in (ROOT / "scripts").rglob("*.py") if not file.stem.startswith("check")]
    for file in files:
        for name in top_level_imports(file) - own - sys.stdlib_module_names:
            packages = {lock.normalize(package) for package in providers[name]}
            assert packages & locked("requirements.lock").keys(), f"{file.name}: {name}"


def top_level_imports(file: Path) -> set[str]:
    """Returns the modules, without their submodules, that a file imports when it is loaded."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def test_the_lock_leaves_the_build_of_torch_to_the_machine() -> None:
    pins = locked("requirements.lock")
    assert re.fullmatch(r"[\d.]+", pins["torch"])
    assert not [name for name in pins if "nvidia" in name or "cuda" in name]


def test_one_version() -> None:
    assert aioinfer.__version__ == PROJECT["project"]["version"]


def test_lock_text_and_names() -> None:
    assert lock.normalize("Typing_Extensions.x") == "typing-extensions-x"
    assert lock.lock_text("Title.", {"b": "2", "a": "1"}).endswith("by hand.\na==1\nb==2\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, as pip has it built without a build environment of its own."""
    source = check_dockerfile.copy_sources(tmp_path_factory.mktemp("image"))
    built = tmp_path_factory.mktemp("wheel")
    command = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", command, built],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (file,) = built.iterdir()
    return zipfile.ZipFile(file)


def test_the_image_gets_all_that_the_package_consists_of(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        folder = PROJECT["tool"]["setuptools"]["package-dir"].get(package)
        files = (ROOT / (folder or package.replace(".", "/"))).glob("*.py")
        assert {f"{package.replace('.', '/')}/{file.name}" for file in files} <= names, package
    assert {"aioinfer/py.typed", "aioinfer/page/page.html"} <= names
    assert {name.partition("/")[0] for name in names} == {
        "aioinfer", f"aioinfer-{aioinfer.__version__}.dist-info",
    }  # fmt: skip
    assert "setuptools" in locked("requirements.lock")  # the image builds with what is installed


def test_the_metadata_are_complete_and_lead_nowhere_else(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"aioinfer-{aioinfer.__version__}.dist-info/METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.author == "The aioinfer developers"
    assert metadata.summary
    assert metadata.classifiers
    assert "Typing :: Typed" in metadata.classifiers
    assert set(metadata.provides_extra or []) == set(PROJECT["project"]["optional-dependencies"])
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description
    assert metadata.description.startswith("# aioinfer\n")
    # an index has no file beside the description
    assert "](" not in metadata.description
    for extra in re.findall(r"aioinfer\[(\w+)\]", metadata.description):
        assert extra in PROJECT["project"]["optional-dependencies"]


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {aioinfer.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
