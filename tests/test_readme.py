"""What README.md and the pages state about the tree and show of the code, compared with both."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import aioinfer.models
from aioinfer.cli.commands import COMMANDS, make_parser, make_server_parser
from aioinfer.cli.model_options import load
from aioinfer.config import describe_keys, load_models
from aioinfer.models import registry
from aioinfer.models.decoder import DecoderModel
from tests.paged_model import PagedModel, load_model
from tests.test_models import SINGLE, TEXTS, VOCAB, assert_close, reference_logits, reference_model
from tests.tiny_models import tiny_model

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


GUIDES = [page for page in PAGES if page.parent.name != "notes"]


def fenced(pages: Iterable[Path], *languages: str) -> list[Any]:
    """Returns the blocks of these languages, each with its place."""
    blocks = []
    for page in pages:
        text = page.read_text("utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: found.start()].count("\n") + 2
            if found[1] in languages:
                blocks.append(pytest.param(found[2], id=f"{page.stem}:{line}"))
    return blocks


@pytest.mark.parametrize("block", fenced(GUIDES, "", "sh", "bash"))
def test_commands_are_accepted(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the configuration: nothing is started."""
    monkeypatch.chdir(ROOT)
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if not re.match(r"(python -m )?aioinfer[. ]", line):
            continue
        command = re.split(r" (?:>>?|\||&) ?", line)[0]
        words = shlex.split(command, comments=True)
        if words[0] == "python":
            module, words = words[2], words[2:]
            assert find_spec(module) is not None
            if module != "aioinfer":
                continue
        if words[1] == "bench":
            continue
        if words[1] in COMMANDS:
            load(make_parser().parse_args(words[1:]))
        elif words[1].startswith("-"):
            options = make_server_parser().parse_args(words[1:])
            load_models(options.config, options.set)


@pytest.mark.parametrize("block", fenced(GUIDES, "toml"))
def test_configurations_are_accepted(block: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(block, "utf-8")
    is_whole = re.search(r"^(model\.)?path = ", block, re.MULTILINE)
    load_models(file, {} if is_whole else {"model.path": "MODEL"})


@pytest.mark.parametrize("block", fenced(GUIDES, "python"))
def test_examples_in_python_import_what_exists(block: str) -> None:
    imports = re.findall(r"^from (aioinfer[\w.]*) import (\([^)]*\)|.*)$", block, re.MULTILINE)
    for module, names in imports:
        found = import_module(module)
        for name in re.findall(r"\w+", names):
            assert hasattr(found, name), (module, name)


TOUR = (ROOT / "docs" / "tour.md").read_text("utf-8")
#: The excerpts: the file that the first line names, and the lines behind it.
EXCERPTS = re.findall(r"^```python\n# (\S+)\n(.*?)\n```$", TOUR, re.MULTILINE | re.DOTALL)
ELISION = "..."


def find_excerpt(excerpt: str, code: str) -> bool:
    """Whether the lines of an excerpt are lines of `code`, in its order and indentation: those
    between two elisions (`...`) without a gap."""
    runs = re.split(rf"^ *{re.escape(ELISION)}$", excerpt, flags=re.MULTILINE)
    at = 0
    for run in (run.strip("\n") for run in runs):
        if run:
            found = f"\n{code}\n".find(f"\n{run}\n", at)
            if found < 0:
                return False
            at = found + len(run) + 1
    return True


def test_the_tour_has_ten_excerpts() -> None:
    assert len(EXCERPTS) == TOUR.count("```python") == 10
    assert len(TOUR.splitlines()) <= 250


@pytest.mark.parametrize(
    ("file", "excerpt"), EXCERPTS, ids=[f"{n}-{file}" for n, (file, _) in enumerate(EXCERPTS, 1)]
)
def test_an_excerpt_is_the_code(file: str, excerpt: str) -> None:
    assert find_excerpt(excerpt, (ROOT / file).read_text("utf-8")), excerpt


def test_other_lines_are_found() -> None:
    code = "def f():\n    a = 1\n    b = 2\n    c = 3\n    return a"
    assert find_excerpt("    a = 1\n    ...\n    return a", code)
    assert find_excerpt("def f():\n    a = 1", code)
    assert not find_excerpt("    a = 1\n    c = 3", code)  # a gap that is not marked
    assert not find_excerpt("    c = 3\n    ...\n    a = 1", code)  # another order
    assert not find_excerpt("    a = 2", code)
    assert not find_excerpt("a = 1", code)  # another indentation
    assert not find_excerpt("    a = 1\n    ...\n    a = 1", code)  # one line for two


PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-family.md").read_text("utf-8")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PAGE.splitlines()) <= 80
    file, line, family = re.findall(r"```(?:python)?\n(.*?)```", PAGE, re.DOTALL)
    name = re.findall(r"`aioinfer/models/(\w+)\.py`", PAGE)[0]
    assert not (Path(registry.__file__).parent / f"{name}.py").exists()
    (tmp_path / f"{name}.py").write_text(file, "utf-8")
    monkeypatch.setattr(aioinfer.models, "__path__", [*aioinfer.models.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "MODULES", [*registry.MODULES, *eval(f"[{line}]")])
    assert eval(f"[{family}]") == [name]
    fields = {"sliding_window": 9, "num_key_value_heads": 2}
    folder = tiny_model(name, tmp_path / "model", vocab_size=VOCAB, **fields)
    theirs = reference_model(folder)
    assert type(theirs).__name__ in registry.families()
    expected = reference_logits(theirs)
    assert len(set(torch.cat(expected).argmax(-1).tolist())) > 25
    model = load_model(folder, SINGLE)
    assert isinstance(model, DecoderModel)
    assert_close(PagedModel(model, 16).run_at_random(TEXTS, longest=12, seed=0), expected)
