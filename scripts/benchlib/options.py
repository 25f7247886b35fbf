"""The command line of `bench.py`: its options, what they may be together, and the load and workload
that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchlib.conversation import Conversations, read_transcripts
from benchlib.load import Load
from benchlib.plot import MISSING, is_available
from benchlib.slo import STREAM_MEASURES, Slo
from benchlib.sweep import Sweep
from benchlib.workload import (
    FilePrompts,
    IntRange,
    PromptMaker,
    RandomPrompts,
    RequestShape,
    SharedPrefixPrompts,
    Workload,
    read_entries,
)

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100
DEFAULT_CONVERSATIONS = 20
#: An open loop's bound on requests under way, so that a server that hangs cannot exhaust the
#: client.
OPEN_LOOP_CONCURRENCY = 1024
#: Options that do not describe the load: they are not written beside its figures. Headers may
#: hold a key.
_NOT_SETTINGS = ("header", "output", "plot", "compare", "force")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line; ends the process with status 2 where they are
    wrong."""
    parser = argparse.ArgumentParser(description="Load generator for OpenAI-compatible servers.")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="sent with each request (repeatable)",
    )
    _add_load(parser)
    _add_requests(parser)
    _add_results(parser)
    options = parser.parse_args(arguments)
    if error := _find_error(options):
        parser.error(error)
    return options


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=int,
        help=f"requests at a time (default: {DEFAULT_CONCURRENCY}); with --rate, the most",
    )
    load.add_argument(
        "--rate",
        type=float,
        help="open loop: requests a second on average, Poisson arrivals; inf for all at once",
    )
    load.add_argument(
        "--sweep",
        type=Sweep.parse,
        metavar="KIND=V,V,...",
        help="points in turn: concurrency=1,2,4 or rate=0.5,1,inf",
    )
    load.add_argument(
        "--num-requests",
        type=int,
        help=f"of each point (default: {DEFAULT_REQUESTS}, or the lines of --file)",
    )
    load.add_argument(
        "--seconds",
        type=float,
        help="for so long new requests are sent at each point, instead of a number of them",
    )
    load.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="requests to send before each point, which do not count",
    )
    load.add_argument(
        "--processes",
        type=int,
        default=1,
        help="client processes that share the load (default: %(default)s)",
    )
    load.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of prompts, lengths and arrivals (default: %(default)s)",
    )
    load.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds a request may take (default: %(default)s)",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("requests")
    prompts.add_argument(
        "--workload", choices=["random", "shared-prefix", "multi-turn"], default="random"
    )
    prompts.add_argument(
        "--input-len",
        type=IntRange.parse,
        default="128",
        help="tokens of random prompts: 128 or 100-1024",
    )
    prompts.add_argument(
        "--output-len", type=IntRange.parse, default="128", help="max_tokens: 128 or 100-1024"
    )
    prompts.add_argument(
        "--prompts",
        choices=["tokens", "words"],
        help="random token ids (default), or words (default for chat)",
    )
    prompts.add_argument(
        "--token-ids",
        type=IntRange.parse,
        default="1000-10000",
        help="range of random ids (default: %(default)s)",
    )
    prompts.add_argument(
        "--file",
        type=Path,
        help="JSONL: a `prompt` or `messages` a line, `max_tokens` if wanted; multi-turn: ShareGPT",
    )
    prompts.add_argument("--temperature", type=float, default=0.0)
    prompts.add_argument(
        "--ignore-eos",
        action="store_true",
        help="request all of --output-len (not every server can)",
    )
    prompts.add_argument(
        "--no-stream", dest="stream", action="store_false", help="whole replies: no TTFT, ITL, TPOT"
    )
    shared = parser.add_argument_group("shared-prefix")
    shared.add_argument(
        "--prefixes", type=int, default=8, help="different ones (default: %(default)s)"
    )
    shared.add_argument(
        "--prefix-len", type=int, default=1000, help="tokens, or words (default: %(default)s)"
    )
    shared.add_argument(
        "--suffix-len",
        type=IntRange.parse,
        default="50",
        help="of each request's own part (default: %(default)s)",
    )
    turns = parser.add_argument_group("multi-turn (--concurrency and --rate count conversations)")
    turns.add_argument(
        "--turns",
        type=IntRange.parse,
        default="4",
        help="of a conversation: 4 or 2-6 (default: %(default)s)",
    )
    turns.add_argument(
        "--conversations",
        type=int,
        help=f"of each point (default: {DEFAULT_CONVERSATIONS}, or those of --file)",
    )
    turns.add_argument(
        "--think-time",
        type=float,
        default=0.0,
        help="mean seconds between an answer and the next turn (default: 0)",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo",
        type=Slo.parse,
        metavar="LIMITS",
        help="goodput under ttft=200ms,itl=30ms,tpot=25ms,e2e=5s or some of them",
    )
    results.add_argument("--output", type=Path, help="file for the figures as JSON")
    results.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="file for a plot (needs matplotlib)"
    )
    results.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A.json", "B.json"),
        help="sends nothing: compares two files of --output",
    )
    results.add_argument(
        "--force", action="store_true", help="compare files of different workloads"
    )


def _find_error(options: argparse.Namespace) -> str | None:
    """Returns the error of the options, if there is one."""
    for name in (
        "concurrency",
        "rate",
        "num_requests",
        "timeout",
        "seconds",
        "processes",
        "prefixes",
        "prefix_len",
        "conversations",
    ):
        if (value := getattr(options, name)) is not None and not value > 0:
            return f"--{name.replace('_', '-')} must be above 0"
    multi_turn = options.workload == "multi-turn"
    sweep_kind = options.sweep.kind if options.sweep else None
    wrong = {
        "--think-time and --warmup must not be below 0": options.think_time < 0
        or options.warmup < 0,
        "the chat endpoint takes no token ids: use --prompts words": options.endpoint == "chat"
        and options.prompts == "tokens",
        "multi-turn conversations are text: use --prompts words": multi_turn
        and options.prompts == "tokens",
        "multi-turn takes --conversations instead of --num-requests": multi_turn
        and options.num_requests is not None,
        "--conversations needs --workload multi-turn": not multi_turn
        and options.conversations is not None,
        "shared-prefix makes its prompts: it takes no --file": options.workload == "shared-prefix"
        and options.file is not None,
        "--header is NAME:VALUE": any(":" not in header for header in options.header),
        "--sweep rate=... excludes --rate": sweep_kind == "rate" and options.rate is not None,
        "--sweep concurrency=... excludes --concurrency": sweep_kind == "concurrency"
        and options.concurrency is not None,
        "whole replies have an e2e limit only": options.slo
        and not options.stream
        and set(STREAM_MEASURES) & options.slo.limits.keys(),
        "--force needs --compare": options.force and not options.compare,
        MISSING: options.plot is not None and not is_available(),
    }
    return next((message for message, is_wrong in wrong.items() if is_wrong), None)


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns the settings that the figures depend on, as JSON has them."""
    plain = (str, int, type(None))
    settings = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS}
    finite = {
        name: value
        for name, value in settings.items()
        if isinstance(value, plain) or (isinstance(value, float) and value < float("inf"))
    }
    return {name: finite.get(name, str(value)) for name, value in settings.items()}


def make_workload(options: argparse.Namespace, shape: RequestShape) -> Workload:
    """Returns the workload that the options describe.

    Raises `ValueError` or `OSError` for a file that cannot be used.
    """
    if options.workload == "multi-turn":
        transcripts = read_transcripts(options.file) if options.file else []
        return Conversations(
            transcripts,
            options.turns,
            options.input_len,
            options.output_len,
            options.think_time,
            options.seed,
        )
    if options.file:
        return FilePrompts(
            shape, read_entries(options.file, shape.chat), options.output_len, options.seed
        )
    maker = PromptMaker(None if shape.chat or options.prompts == "words" else options.token_ids)
    if options.workload == "shared-prefix":
        lengths = options.prefixes, options.prefix_len, options.suffix_len, options.output_len
        return SharedPrefixPrompts(shape, maker, *lengths, options.seed)
    return RandomPrompts(shape, maker, options.input_len, options.output_len, options.seed)


def make_loads(options: argparse.Namespace, workload: Workload) -> list[tuple[float | None, Load]]:
    """Returns the load of each point with the swept value; a run that is no sweep is one point,
    without a value."""
    values: tuple[float | None, ...] = options.sweep.values if options.sweep else (None,)
    number = options.num_requests or options.conversations
    if number is None and options.seconds is None:
        number = _default_number(workload)
    loads = []
    for value in values:
        concurrency, rate = options.concurrency, options.rate
        if options.sweep and options.sweep.kind == "rate":
            rate = value
        elif value is not None:
            concurrency = int(value)
        concurrency = concurrency or (OPEN_LOOP_CONCURRENCY if rate else DEFAULT_CONCURRENCY)
        loads.append((value, Load(concurrency, rate, number, options.seconds, options.seed)))
    return loads


def _default_number(workload: Workload) -> int:
    if isinstance(workload, FilePrompts):
        return len(workload.entries)
    if isinstance(workload, Conversations):
        return len(workload.transcripts) or DEFAULT_CONVERSATIONS
    return DEFAULT_REQUESTS
