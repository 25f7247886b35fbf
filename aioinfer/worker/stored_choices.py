"""The file that keeps which kernels were the fastest, beside Triton's compiled kernels, so that a
second start times nothing.

There is a file for each machine, that is for each card with its versions of torch, Triton and our
kernels; in it are the products of all models that were served there. Read and written by
`kernel_timing`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

#: The text of a candidate by number of rows, by the text of a product.
Texts = dict[str, dict[int, str]]


def machine_of(device: Any) -> dict[str, str]:
    """Returns the properties that measured times depend on beside the products, for a GPU."""
    import torch
    import triton

    import aioinfer.kernels.few_rows_dense as kernels

    properties = torch.cuda.get_device_properties(device)
    blas = str(torch.backends.cuda.preferred_blas_library()).lower()
    return {
        "card": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "blas": "cublaslt" if "cublaslt" in blas else "cublas",
        "kernels": hash_sources(Path(kernels.__file__).parent),
    }


def hash_sources(folder: Path) -> str:
    """Returns a hash of the Python files in a folder, names and texts."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        digest.update(f"{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


class StoredChoices:
    """The file of one machine.

    Args:
        folder: of the file; made when something is stored.
        machine: see `machine_of`.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path, machine: Mapping[str, str]):
        self._machine = dict(machine)
        text = json.dumps(self._machine, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = folder / f"aioinfer-kernels-{name}.json"
        self._seen: Texts = {}

    def read(self) -> Texts:
        """Returns the stored choices; none if there is no file, or it is damaged or of another
        machine."""
        self._seen = self._load()
        return self._seen

    def _load(self) -> Texts:
        try:
            content = json.loads(self.path.read_bytes())
            if content["machine"] != self._machine:
                return {}
            return {
                str(product): {int(rows): str(text) for rows, text in by_rows.items()}
                for product, by_rows in content["choices"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read, kernels are timed again: %s", self.path, error)
            return {}

    def add(self, measured: Texts) -> Texts:
        """Stores choices, and returns them, or the choices of another process where it has stored
        some since `read`, so that engines that start together compute alike. A folder that cannot
        be written to is reported in the log: the next start times them again.

        Of processes that write at the same moment, the last one's additions may be all that is
        kept.
        """
        stored = self._load()
        for product, by_rows in measured.items():
            now, seen = stored.get(product, {}), self._seen.get(product, {})
            others = {rows: text for rows, text in now.items() if text != seen.get(rows)}
            stored[product] = dict(sorted((now | by_rows | others).items()))
        content = {"machine": self._machine, "choices": stored}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            _log.warning("the fastest kernels cannot be stored: %s", error)
        return {
            product: {rows: stored[product][rows] for rows in by_rows}
            for product, by_rows in measured.items()
        }


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that it is never seen half done."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
