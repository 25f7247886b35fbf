"""What README.md and the pages state about the tree, compared with the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioinfer.config import describe_keys

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def layout() -> list[str]:
    """Returns the folders that the layout block names, one a line, each ending in a slash."""
    block = README.partition("## Layout\n\n```\n")[2].partition("```")[0]
    return [line.split()[0] for line in block.splitlines()]


def test_the_layout_names_every_folder_once() -> None:
    folders = layout()
    assert len(set(folders)) == len(folders)
    packages = {
        f"{folder.relative_to(ROOT).as_posix()}/"
        for folder in (ROOT / "aioinfer").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    top = {"aioinfer/", "configs/", "docs/", "kernels/", "notes/", "scripts/", "tests/"}
    assert set(folders) == packages | top


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "notes").glob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8"))
    for file, anchor in links:
        if file.startswith("http"):
            continue
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("name", ["architecture", "extending", "tour"])
def test_pages_of_the_code_name_files_that_exist(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    for file in re.findall(r"`((?:[\w]+/)+[a-z_]+\.py)`", text):
        assert (ROOT / file).exists() or (ROOT / "aioinfer" / file).exists(), file


def test_commands_name_files_that_exist() -> None:
    for file in re.findall(r"(?:configs|scripts|docs|notes)/[\w./-]+\w", README):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "notes"], ids=lambda page: page.stem
)
def test_keys_of_the_configuration_exist(page: Path) -> None:
    keys = {key for key, *_ in describe_keys()}
    sections = "|".join({key.partition(".")[0] for key in keys})
    named = re.findall(
        rf"(?:--set |`)((?:{sections})\.(?!toml|py)[a-z_]+)[`= ]", page.read_text("utf-8")
    )
    assert set(named) <= keys
