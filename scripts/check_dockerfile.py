"""Executes what configs/deploy/Dockerfile says without Docker: in a folder and a virtual
environment of its own.

    python scripts/check_dockerfile.py [--keep FOLDER] [--python python3.12]

`COPY` takes the named files and nothing else, so that a missing one shows. `RUN python -m pip`
runs with the environment's Python and the image's `ENV`, paths mapped into the folder; pip's cache
stays in use, other than in the image. Then `ENTRYPOINT` with `CMD` starts the server from there, on
a free port of the loopback interface, `HEALTHCHECK` asks it for its health, and `STOPSIGNAL` ends
it. An instruction that needs root or an image (`FROM`, `RUN useradd`, `USER`, `VOLUME`) is printed
and left out.

It takes some minutes and several gigabytes, since it installs PyTorch. Tests replay only the
copying (`copy_sources`), and build the package from that.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "configs" / "deploy" / "Dockerfile"
IGNORE = DOCKERFILE.with_name("Dockerfile.dockerignore")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields the instructions of a Dockerfile and what follows each; lines that are continued are
    joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            kind, _, rest = line.strip().partition(" ")
            yield kind, rest.strip()


class Image:
    """The folder that stands for the root of an image, and the state that its instructions have
    set."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.workdir = folder
        self.environment = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
        }
        self.commands: dict[str, list[str]] = {}
        self.stop_signal = signal.SIGTERM
        self.python = str(folder / "venv" / "bin" / "python")

    def make_environment(self, python: str) -> None:
        """Makes the virtual environment in which `RUN python` runs."""
        subprocess.run([python, "-m", "venv", str(self.folder / "venv")], check=True)

    def path(self, text: str) -> Path:
        """Returns the place of a path of the image on this machine."""
        return self.folder / text.lstrip("/") if text.startswith("/") else self.workdir / text

    def execute(self, kind: str, rest: str) -> None:
        """Executes an instruction, or prints that it is left out.

        Raises subprocess.CalledProcessError or OSError if it fails.
        """
        print(f"{kind} {rest}", flush=True)
        if kind == "WORKDIR":
            self.workdir = self.path(rest)
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            self._copy(shlex.split(rest))
        elif kind == "ENV":
            self._set(shlex.split(rest))
        elif kind == "RUN" and rest.startswith("python "):
            command = [self.python, *shlex.split(rest)[1:]]
            began = time.monotonic()
            subprocess.run(command, cwd=self.workdir, env=self.environment, check=True)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
        elif kind in ("ENTRYPOINT", "CMD"):
            self.commands[kind] = json.loads(rest)
        elif kind == "HEALTHCHECK":
            self.commands[kind] = json.loads(rest.partition("CMD")[2])
        elif kind == "STOPSIGNAL":
            self.stop_signal = signal.Signals[rest]
        else:
            print("  left out", flush=True)

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        if target.endswith("/"):
            self.path(target).mkdir(parents=True, exist_ok=True)
        sent = {line[1:] for line in IGNORE.read_text("utf-8").splitlines() if line[:1] == "!"}
        for source in sources:
            if source not in sent:
                raise FileNotFoundError(f"{source} is not in the build context: {IGNORE.name}")
            # a folder's content is copied, a file is put below a target that ends in a slash
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    ROOT / source, self.path(target), ignore=ignored, dirs_exist_ok=True
                )
            else:
                shutil.copy(ROOT / source, self.path(target))

    def _set(self, words: list[str]) -> None:
        for word in words:
            name, _, value = word.partition("=")
            if name == "PIP_NO_CACHE_DIR":
                print("  PIP_NO_CACHE_DIR left out", flush=True)
                continue
            self.environment[name] = str(self.path(value)) if value.startswith("/") else value

    def serve(self) -> None:
        """Starts the server as a container would, asks for its health, and stops it.

        Raises AssertionError or subprocess.CalledProcessError if it does not go as it should.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [*self.commands["ENTRYPOINT"], *self.commands["CMD"]]
        command[0] = self.python
        # a container's 0.0.0.0 is a network of its own; here it would be every interface
        command += ["--set", "server.host=127.0.0.1", "--set", f"server.port={port}"]
        print(shlex.join(command), flush=True)
        server = subprocess.Popen(command, cwd=self.workdir, env=self.environment)
        try:
            check = [word.replace(":8000", f":{port}") for word in self.commands["HEALTHCHECK"]]
            check[0] = self.python
            deadline = time.monotonic() + 300
            while subprocess.run(check, capture_output=True, check=False).returncode:
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not become healthy"
                time.sleep(1)
            print("healthy", flush=True)
            complete(port)
            server.send_signal(self.stop_signal)
            assert server.wait(60) == 0, "the exit status"
        finally:
            server.kill()
            server.wait()


def copy_sources(folder: Path) -> Path:
    """Copies the files that the image gets from the checkout, and returns the image's working
    directory, from which the package is installed."""
    image = Image(folder)
    for kind, rest in instructions(DOCKERFILE.read_text("utf-8")):
        if kind in ("WORKDIR", "COPY"):
            image.execute(kind, rest)
    return image.workdir


def complete(port: int) -> None:
    """Prints a completion of the server at `port`."""
    import urllib.request

    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        print(json.load(response)["choices"][0]["text"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Executes configs/deploy/Dockerfile.")
    parser.add_argument("--keep", type=Path, help="a folder to work in, which is kept")
    parser.add_argument("--python", default=sys.executable, help="makes the environment")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image(folder)
        image.make_environment(arguments.python)
        for kind, rest in instructions(DOCKERFILE.read_text("utf-8")):
            image.execute(kind, rest)
        image.serve()


if __name__ == "__main__":
    main()
