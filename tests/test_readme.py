"""What README.md says about the tree, compared with the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def layout() -> list[str]:
    """Returns the paths of the layout block; a folder's line ends in a slash and stands before its
    files, which are indented."""
    block = README.partition("## Layout\n\n```\n")[2].partition("```")[0]
    paths: list[str] = []
    folders: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = [*folders[:depth], name] if name.endswith("/") else folders[:depth]
        paths.append("".join(folders) if name.endswith("/") else "".join(folders) + name)
    return paths


def test_the_layout_names_every_module_once() -> None:
    paths = layout()
    assert len(set(paths)) == len(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = {
        file.relative_to(ROOT).as_posix()
        for top in ("aioinfer", "kernels", "scripts")
        for file in (ROOT / top).rglob("*.py")
    }
    empty = {module for module in modules if not (ROOT / module).read_text("utf-8").strip()}
    named = {path for path in paths if path.endswith(".py")}
    assert modules - empty - {"scripts/benchlib/__init__.py"} == named - {
        path for path in named if path.startswith("tests/")
    }


def test_the_life_of_a_request_names_functions_that_exist() -> None:
    rows = re.findall(r"^\| .* \| (`aioinfer/.*) \|$", README, re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        names: set[str] = set()
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith(".py"):
                tree = ast.parse((ROOT / word).read_text("utf-8"))
                names = {
                    node.name
                    for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                }
            else:
                assert word in names, f"{word} is not in the file named before it: {row}"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_commands_name_files_that_exist() -> None:
    for file in re.findall(r"(?:configs|scripts|docs)/[\w./]+\w", README):
        assert (ROOT / file).exists(), file
