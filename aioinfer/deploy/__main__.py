"""`python -m aioinfer.deploy`: the same as `aioinfer deploy`, whose command line is in `cli`, above
this package."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("aioinfer.__main__").main(["deploy", *sys.argv[1:]]))
