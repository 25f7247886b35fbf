"""Clients for node: `node/clients.test.js`, run where `make test-clients` has installed them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Server


def test_node(server: Server, request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.getoption("--node-folder"))
    assert (folder / "node_modules").is_dir(), f"npm has installed nothing in {folder}"
    tests = Path(__file__).parent / "node" / "clients.test.js"
    shutil.copy(tests, folder)  # node looks for packages from there upwards
    address = {"AIOINFER_URL": server.url, "AIOINFER_MODEL": server.model}
    done = subprocess.run(
        ["node", "--test", tests.name], cwd=folder, env=os.environ | address, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
