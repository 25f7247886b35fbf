"""Imports go down only: no package uses one that stands above it; and nothing reads a pickle, which
runs code of whoever wrote it. Messages between the server and its own workers are the exception:
they travel over pipes that no other process has (`multiprocessing.connection`), and under torchrun
over a Unix socket in a folder of the user's alone. What other hosts send is JSON."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
#: From the top down, as the page has it. Packages side by side do not import each other.
ORDER = [names.split() for names in _PAGE.partition("### Imports\n")[2].split("```")[1].split(">")]
HEIGHT = {name: -height for height, names in enumerate(ORDER) for name in names}
#: Imported by none of the modules in a package: (package, module).
BANNED = (
    ("scheduler", "torch"), ("scheduler", "aiohttp"), ("text", "torch"), ("engine", "aiohttp"),
    ("ipc", "torch"), ("cluster", "torch"), ("cluster", "ray"), ("cluster", "aiohttp"),
    ("gateway", "ray"),
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Returns the file of each module of the package, by its name within the package."""
    found = {
        ".".join(file.relative_to(ROOT / "aioinfer").with_suffix("").parts): file
        for file in (ROOT / "aioinfer").rglob("*.py")
    }
    kernels = {f"kernels.{file.stem}": file for file in (ROOT / "kernels").glob("*.py")}
    return found | kernels


MODULES = modules()


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Returns (line, module) for each import of a file, wherever it stands: in a function, or for
    type checking only."""
    found = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def package_of(module: str) -> str:
    return module.split(".")[0]


def climbs(name: str, file: Path) -> list[str]:
    """Returns the imports of a module that go up or sideways."""
    found = []
    own = package_of(name)
    for line, target in imports(file):
        parts = target.split(".")
        if parts[0] != "aioinfer" or parts[1:] == ["__version__"]:
            continue  # the version is the package's own, which is there before its modules are
        other = parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"
        if other != own and HEIGHT[other] >= HEIGHT[own]:
            found.append(f"line {line}: {target}")
    return found


def test_every_module_has_a_place() -> None:
    assert {package_of(name) for name in MODULES} == HEIGHT.keys()


def test_imports_go_down() -> None:
    found = {name: climbs(name, file) for name, file in MODULES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_import_that_climbs_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from aioinfer.errors import ConfigError\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from aioinfer.engine.engine import Engine\n"
        "def late():\n"
        "    import aioinfer.api.server\n"
    )
    found = climbs("ipc.ring", file)
    assert found == ["line 4: aioinfer.engine.engine.Engine", "line 6: aioinfer.api.server"]


@pytest.mark.parametrize(("package", "banned"), BANNED)
def test_what_a_package_does_without(package: str, banned: str) -> None:
    for name, file in MODULES.items():
        if package_of(name) == package:
            found = [
                (line, target) for line, target in imports(file) if package_of(target) == banned
            ]
            assert not found, name


def test_no_cycle_within_a_package() -> None:
    """Modules of a package form a hierarchy, too: none imports one that imports it."""
    edges: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        targets = {target.removeprefix("aioinfer.") for _, target in imports(file)}
        # `from aioinfer.a.b import c` names the object or the module
        named = targets | {target.rpartition(".")[0] for target in targets}
        edges[name] = {other for other in named if other in MODULES and other != name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


#: Calls and modules that unpickle.
UNPICKLES = re.compile(
    r"torch\.load\b|\bpickle\b|\bcPickle\b|\bdill\b|\bjoblib\b|\bshelve\b|\bmarshal\b"
    r"|allow_pickle\s*=\s*True|\bread_pickle\b"
)
SOURCES = sorted([*ROOT.glob("aioinfer/**/*.py"), *ROOT.glob("kernels/*.py")])


def test_no_module_unpickles() -> None:
    found = [
        (file, line)
        for file in SOURCES
        for line in file.read_text("utf-8").splitlines()
        if UNPICKLES.search(line.partition("#")[0])
    ]
    assert found == []


def test_weights_are_looked_for_in_safetensors_files_only(tmp_path: Path) -> None:
    from aioinfer.checkpoint.source import _TEXT_FILES
    from aioinfer.errors import ConfigError
    from aioinfer.models.loader import locate_tensors

    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")  # the pickle of 1
    with pytest.raises(ConfigError, match="holds no safetensors files"):
        locate_tensors(tmp_path)
    assert not any(pattern.endswith((".bin", ".pt", ".pth", ".pkl")) for pattern in _TEXT_FILES)
