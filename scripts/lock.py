"""Writes requirements.lock and requirements-test.lock: the exact versions of all dependencies
(`make lock`).

pip resolves the requirements of pyproject.toml, without installing anything: once the run-time
dependencies, once the same together with the `test` group. The first file holds the versions that
the second resolution chose for the run-time packages, so that both files can be installed into one
environment; the second file holds the rest.

    python scripts/lock.py
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def resolve(requirements: Sequence[str], pins: Sequence[str]) -> dict[str, str]:
    """Returns the version of every package that `requirements` lead to, by name, under the
    constraints `pins`."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text("\n".join(pins), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
        ]
        subprocess.run(
            [*command, "--report", report, "--constraint", constraints, *requirements], check=True
        )
        found = json.loads(report.read_text("utf-8"))["install"]
    versions = {item["metadata"]["name"]: item["metadata"]["version"] for item in found}
    # a local version such as 2.13.0+cpu names one build; the lock leaves the build to the machine
    return {normalize(name): version.partition("+")[0] for name, version in versions.items()}


def normalize(name: str) -> str:
    """Returns a package's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_text(title: str, versions: Mapping[str, str]) -> str:
    """Returns the text of a lock file."""
    head = f"# {title} Made by `make lock` from pyproject.toml; not edited by hand.\n"
    return head + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def main() -> None:
    """Resolves and writes both files."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    # the extra `cpu` is part of what `make serve` runs
    extra: list[str] = project["project"]["optional-dependencies"]["cpu"]
    run_time: list[str] = [*project["project"]["dependencies"], *extra]
    test: list[str] = project["dependency-groups"]["test"]
    pins: list[str] = project["tool"]["aioinfer"]["lock"]["pins"]
    everything = resolve([*run_time, *test], pins)
    needed = resolve(
        run_time, [*pins, *(f"{name}=={version}" for name, version in everything.items())]
    )
    rest = {name: version for name, version in everything.items() if name not in needed}
    (ROOT / "requirements.lock").write_text(lock_text("What the server needs.", needed), "utf-8")
    (ROOT / "requirements-test.lock").write_text(
        lock_text("What the tests need besides requirements.lock.", rest), "utf-8"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help writes nothing
    main()
