"""The examples of Python on the pages run with the demo model, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.conftest import SMOLLM2

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/python.md", "docs/embeddings.md")
#: Examples that import nothing are parts of others; a client needs its server, `web.run_app` serves
#: without end.
EXAMPLES = [
    (page, code)
    for page in PAGES
    for code in re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    if "import" in code and not re.search(r"web\.run_app|from openai", code)
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_an_example_runs(page: str, code: str, tmp_path: Path) -> None:
    code = re.sub(r'"Qwen/Qwen3-0\.6B"', f'"{SMOLLM2}"', code)
    assert SMOLLM2 in code, "the example serves another model"
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
