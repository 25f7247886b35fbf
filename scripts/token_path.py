"""Lists the files that one decode token passes through, with their lines of code.

    python scripts/token_path.py [--executor multiprocess|inline] [--device cpu|cuda] \
        [--set SECTION.KEY=VALUE] [--functions] [--json] [--limit-files N] [--limit-lines N]

Serves a small Llama with random weights over a socket, and streams one greedy completion, after
another one as a warm-up. In the steady part of the stream it records which functions of `aioinfer/`
and `kernels/` are called, in all threads of the server and of its worker process: a step's result
arrives and is applied, the next step is planned and posted, the worker executes it, and the token's
text is written to the socket. A function is on the path if it is called in `MIN_INTERVALS` or more
of the intervals between two tokens. So the work that is done once for each KV block is on the path;
timers of the event loop are not, and neither is what happens once.

Prints for each file of the path its lines of code (without blank lines, comments and docstrings),
how many of them belong to the functions called, and the number of these functions; `--functions`
prints their names. Files that only declare classes of arguments of these functions are listed
behind the total. The exit status is 1 if the path has more files or lines of code than a limit.

With `--device cuda` the stream is recorded twice, with CUDA graphs and without: the replay of a
graph calls none of the layers that it was captured from. Triton kernels count as functions, with
the Triton functions that they call. Functions compiled by numba or written in C are not recorded.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import mmap
import multiprocessing
import os
import re
import signal
import struct
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Nothing of aioinfer is imported here: worker processes import this module before anything else.

ROOT = Path(__file__).resolve().parent.parent
# a checkout is enough, and it is this one that is measured
sys.path.insert(0, str(ROOT))

#: The folders of the path in the order in which a token passes through them; any other follows.
STAGES = (
    "api", "text", "engine", "features", "scheduler", "ipc", "executor", "worker", "models",
    "layers", "kernels",
)  # fmt: skip
#: Tokens before the recording, during it and after it. The engine is two steps ahead of a client.
BEFORE, RECORDED, AFTER = 16, 64, 16
#: The path has the functions that are called in so many of the recorded intervals. A KV block of
#: `BLOCK_SIZE` tokens is filled in four of them.
MIN_INTERVALS = 3
BLOCK_SIZE = 16

_SETTINGS: dict[str, Any] = {
    "model.load_format": "dummy",
    "model.max_model_len": 256,
    "cache.block_size": BLOCK_SIZE,
    "cache.num_blocks": 64,
    "scheduler.max_num_seqs": 4,
    "scheduler.max_num_batched_tokens": 256,
    "parallel.cpu_threads": 1,
    "server.port": 0,
    "speculation.method": "none",  # the path of a token that no step has drafted
}
_PRINTABLE = [chr(code) for code in range(33, 127)]
_VOCABULARY = [*_PRINTABLE, "Ġ", *(f"a{character}" for character in _PRINTABLE[:33])]
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "vocab_size": len(_VOCABULARY), "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
_NO_CODE = frozenset(
    (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
)  # fmt: skip
#: Makes another process record the calls of its main thread.
_START_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True)
class PathFile:
    """A file of the path.

    Attributes:
        stage: the folder within the package; `aioinfer` for the package itself.
        path: from the root of the checkout.
        code_lines: lines of the file that hold more than comments and docstrings.
        called_lines: those of them that belong to the functions called.
        functions: the names of the functions called, in the order of the file.
    """

    stage: str
    path: str
    code_lines: int
    called_lines: int
    functions: list[str]


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The files that a decode token passes through, stage by stage.

    Attributes:
        files: those with functions on the path.
        declaring: files without such functions, which declare classes of their arguments.
    """

    files: list[PathFile]
    declaring: list[PathFile]

    @property
    def code_lines(self) -> int:
        """The code lines of the files with functions on the path."""
        return sum(file.code_lines for file in self.files)


# ---------------------------------------------------------------- recording


class Recorder:
    """Records in one process which functions of the project are called.

    The processes share the number of the current interval between two tokens, 0 while nothing is
    recorded, in the file `interval`. Each writes the functions that it finds on the path to a file
    of its own, at once: worker processes end without notice.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        with (folder / "interval").open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self._interval = memoryview(self._shared).cast("q")
        self._calls = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        # the intervals in which a function was called; None once it is written, or not ours
        self._seen: dict[CodeType, set[int] | None] = {}

    @property
    def interval(self) -> int:
        """The number of the current interval; 0 while nothing is recorded."""
        return self._interval[0]

    @interval.setter
    def interval(self, number: int) -> None:
        self._interval[0] = number

    def close(self) -> None:
        """Ends the recording in all processes, and closes the file of this one."""
        self.interval = 0
        self._calls.close()

    def is_shared_by(self, pid: int) -> bool:
        """Whether a process records, too."""
        return (self._folder / f"{pid}.jsonl").exists()

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        """Records a call and its caller, which may have been running before; a profile function of
        `sys.setprofile`."""
        interval = self._interval[0]
        if event != "call" or not interval:
            return
        self._record(frame, interval)
        if frame.f_back is not None:
            self._record(frame.f_back, interval)

    def _record(self, frame: FrameType, interval: int) -> None:
        code = frame.f_code
        if code.co_name == "run" and code.co_filename.endswith("triton/runtime/jit.py"):
            for kernel in _kernels_of(frame.f_locals["self"]):
                self._add(kernel, frame, interval)
        else:
            self._add(code, frame, interval)

    def _add(self, code: CodeType, frame: FrameType, interval: int) -> None:
        if code not in self._seen:
            self._seen[code] = None if _place_of(code, frame) is None else set()
        intervals = self._seen[code]
        if intervals is None or interval in intervals or _is_in_timer(frame):
            return
        intervals.add(interval)
        if len(intervals) < MIN_INTERVALS:
            return
        self._seen[code] = None
        call = {"function": _place_of(code, frame), "classes": _classes_of_arguments(frame)}
        self._calls.write(json.dumps(call) + "\n")
        self._calls.flush()


def _is_in_timer(frame: FrameType | None) -> bool:
    """Whether a timer of asyncio's event loop has led to a call. (uvloop's leaves no trace.)"""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            return isinstance(frame.f_locals["self"], asyncio.TimerHandle)
        frame = frame.f_back
    return False


def _place_of(code: CodeType, frame: FrameType) -> tuple[str, int, str] | None:
    """Returns a function's path from the root, first line and name; None for functions of other
    projects, and of this script. A function that `dataclasses` has made is the module's that
    declares the class; its line is 0."""
    file, line, name = code.co_filename, code.co_firstlineno, code.co_qualname
    if file == "<string>" and code.co_varnames[:1] == ("self",):
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        file, line = getattr(module, "__file__", None) or "", 0
        name = f"{type(frame.f_locals['self']).__qualname__}.{code.co_name}"
    path = _path_of(file)
    return None if path is None else (path, line, name)


def _path_of(file: str) -> str | None:
    """Returns the path of a file of the project from its root; None for other files."""
    path = Path(file).resolve()
    if not any(path.is_relative_to(ROOT / folder) for folder in ("aioinfer", "kernels")):
        return None
    return path.relative_to(ROOT).as_posix()


def _classes_of_arguments(frame: FrameType) -> list[str]:
    """Returns the paths of the files that declare the classes of a function's arguments."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [frame.f_locals[name] for name in names if name in frame.f_locals]
    modules = {kind.__module__ for value in values for kind in type(value).__mro__}
    files = {getattr(sys.modules.get(module), "__file__", None) for module in modules}
    return sorted({path for file in files if file and (path := _path_of(file)) is not None})


def _kernels_of(kernel: Any) -> Iterator[CodeType]:
    """Yields the code of a Triton kernel and of all that it calls."""
    found, waiting = {id(kernel)}, [kernel]
    while waiting:
        function = waiting.pop().fn
        yield function.__code__
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if type(called).__name__ == "JITFunction" and id(called) not in found:
                found.add(id(called))
                waiting.append(called)


def record_process(folder: str) -> None:
    """Has this process, and processes that it forks, record, from `_START_SIGNAL` on, the calls of
    their main threads, and of the threads that they start. Called at the start of the process that
    workers are forked from."""

    def prepare() -> None:
        recorder = Recorder(Path(folder))
        threading.setprofile(recorder.record)
        signal.signal(_START_SIGNAL, lambda *_: sys.setprofile(recorder.record))

    prepare()
    os.register_at_fork(after_in_child=prepare)


@contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    """Yields a recorder of this process. Until the end, the threads that are started and the
    processes that are spawned record, too."""
    (folder / "interval").write_bytes(struct.pack("q", 0))
    hook = f"import token_path\ntoken_path.record_process({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(hook, "utf-8")
    recorder = Recorder(folder)
    former, former_profile = os.environ.get("PYTHONPATH"), threading.getprofile()
    places = [str(folder), str(ROOT / "scripts"), str(ROOT), former or ""]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    threading.setprofile(recorder.record)
    try:
        yield recorder
    finally:
        recorder.close()
        threading.setprofile(former_profile)
        if former is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = former


# ---------------------------------------------------------------- the stream


def write_model(folder: Path) -> None:
    """Writes the configuration of a small Llama, and a tokenizer whose every token is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(_VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), "utf-8")
    (folder / "config.json").write_text(json.dumps(_MODEL), "utf-8")


async def record_stream(folder: Path, recorder: Recorder, settings: Mapping[str, Any]) -> None:
    """Serves the model in `folder`, and records the steady part of a stream."""
    from aioinfer.api.server import HttpServer
    from aioinfer.config import load_config
    from aioinfer.engine.frontend import Frontend

    config = load_config(None, {"model.path": str(folder)} | _SETTINGS | dict(settings))
    frontend = await Frontend.launch(config)
    server = HttpServer(frontend.config, frontend)
    try:
        url = await server.start()
        port = int(url.rpartition(":")[2])
        await _stream(port)
        await _stream(port, recorder)
    finally:
        await server.close()
        await frontend.close()


async def _stream(port: int, recorder: Recorder | None = None) -> None:
    """Reads a stream to its end; a recorder records its steady part."""
    body = json.dumps(
        {
            "prompt": "Hello", "max_tokens": BEFORE + RECORDED + AFTER, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    events = 0
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            events += 1
            if recorder is None:
                continue
            if events == BEFORE:
                _start(recorder)
            if BEFORE <= events < BEFORE + RECORDED:
                recorder.interval = events - BEFORE + 1
            else:
                _stop(recorder)
    finally:
        writer.close()
        if recorder is not None:
            _stop(recorder)
    if events < BEFORE + RECORDED:
        raise RuntimeError(f"the stream had {events} events, and not one for each token")


def _start(recorder: Recorder) -> None:
    """Begins the recording in this thread, and in the main threads of the workers."""
    for process in multiprocessing.active_children():
        if process.pid is not None and recorder.is_shared_by(process.pid):
            os.kill(process.pid, _START_SIGNAL)
    sys.setprofile(recorder.record)


def _stop(recorder: Recorder) -> None:
    """Ends the recording, in all processes. Safe to call twice, and before `_start`."""
    if recorder.interval:
        recorder.interval = 0
        sys.setprofile(None)


# ---------------------------------------------------------------- code lines


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold more than white space, comments and docstrings."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                found.difference_update(range(first, last + 1))
    return found


def _lines_of_functions(source: str) -> dict[int, range]:
    """Returns the lines of each function by the first one, where its decorators begin."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            found[first] = range(first, (node.end_lineno or first) + 1)
    return found


def read_path(folder: Path) -> TokenPath:
    """Returns the path that the recorders of a folder, or of several below it, have found."""
    called: dict[str, dict[str, int]] = {}  # first lines by path and name
    declaring: set[str] = set()
    for record in folder.rglob("*.jsonl"):
        for line in record.read_text("utf-8").splitlines():
            call = json.loads(line)
            path, first, name = call["function"]
            # a comprehension belongs to its function; up to Python 3.11 it is one itself
            name = re.sub(r"\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>", "", name)
            functions = called.setdefault(path, {})
            functions[name] = min(first, functions.get(name, first))
            declaring.update(call["classes"])
    return TokenPath(
        _in_order(_describe(path, functions) for path, functions in called.items()),
        _in_order(_describe(path, {}) for path in declaring - called.keys()),
    )


def _describe(path: str, functions: Mapping[str, int]) -> PathFile:
    """Returns a file of the path, given the first line of each function called."""
    source = (ROOT / path).read_text("utf-8")
    lines, extents = code_lines(source), _lines_of_functions(source)
    called = {line for first in functions.values() for line in extents.get(first, ())}
    names = sorted(functions, key=lambda name: (functions[name], name))
    package, *folders, _ = Path(path).parts
    stage = folders[0] if folders else package
    return PathFile(stage, path, len(lines), len(lines & called), names)


def _in_order(files: Iterable[PathFile]) -> list[PathFile]:
    return sorted(files, key=lambda file: (_order_of(file.stage), file.path))


def _order_of(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)


# ---------------------------------------------------------------- the whole


def measure(settings: Mapping[str, Any] | None = None) -> TokenPath:
    """Returns the path of a token, for a configuration that `settings` change."""
    wanted = {"parallel.device": "cpu"} | dict(settings or {})
    variants = [wanted]
    if wanted["parallel.device"] == "cuda":
        variants = [wanted | {"parallel.cuda_graphs": replays} for replays in (True, False)]
    with tempfile.TemporaryDirectory() as name:
        for number, variant in enumerate(variants):
            # a process of its own has a fork server of its own, whose workers record
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                pool.submit(_measure, Path(name, str(number)), variant).result()
        return read_path(Path(name))


def _measure(folder: Path, settings: Mapping[str, Any]) -> None:
    """Records the path of a token in files of a new folder."""
    folder.mkdir()
    write_model(folder)
    with (
        recording(folder) as recorder,
        # the standard event loop tells timers from other callbacks: see `_is_in_timer`
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        runner.run(record_stream(folder, recorder, settings))


def render(path: TokenPath, *, names: bool = False) -> str:
    """Returns a table of the files and the totals; with the functions' names if `names`."""
    width = max(len(file.path) for file in path.files + path.declaring)
    lines = [f"{'stage':9} {'file':{width}} {'code':>6} {'called':>6} {'functions':>9}"]
    stage = ""
    for file in path.files:
        shown, stage = "" if file.stage == stage else file.stage, file.stage
        lines.append(
            f"{shown:9} {file.path:{width}} {file.code_lines:6} {file.called_lines:6} "
            f"{len(file.functions):9}"
        )
        if names:
            lines += [f"{'':12}{function}" for function in file.functions]
    lines.append(
        f"{'total':9} {f'{len(path.files)} files':{width}} {path.code_lines:6} "
        f"{sum(file.called_lines for file in path.files):6} "
        f"{sum(len(file.functions) for file in path.files):9}"
    )
    if path.declaring:
        lines += ["", "not in the total: files that declare no more than classes of arguments"]
        lines += [f"{'':9} {file.path:{width}} {file.code_lines:6}" for file in path.declaring]
    return "\n".join(lines)


def _setting(text: str) -> tuple[str, Any]:
    """Returns the key and the value of `SECTION.KEY=VALUE`: JSON, or else a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executor", choices=["multiprocess", "inline"], default="multiprocess")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--set", type=_setting, action="append", default=[])
    parser.add_argument("--functions", action="store_true", help="print their names, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--limit-files", type=int, default=sys.maxsize)
    parser.add_argument("--limit-lines", type=int, default=sys.maxsize)
    options = parser.parse_args(arguments)
    settings = {"parallel.executor": options.executor, "parallel.device": options.device}
    path = measure(settings | dict(options.set))
    if options.json:
        totals = {"total_files": len(path.files), "total_code_lines": path.code_lines}
        print(json.dumps(asdict(path) | totals, indent=1))
    else:
        print(render(path, names=options.functions))
    return int(len(path.files) > options.limit_files or path.code_lines > options.limit_lines)


if __name__ == "__main__":
    sys.exit(main())
