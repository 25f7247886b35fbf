"""What drafts can bring on a GPU: the times of captured decode steps by their rows, and the tokens
a second of steps with no drafts, one, two and so on.

    python scripts/time_steps.py --model FOLDER --acceptance 0.80,0.62,0.48
    python scripts/time_steps.py --model FOLDER --streams 64,128 --set model.load_format=dummy

The steps are those that the workers time at their start, with the keys that they take there; no
prompt's prefill is in them. `--acceptance` is the part of all first, second and third drafts that
is kept. A number of drafts whose rows exceed the largest captured step is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from aioinfer import LLM
from aioinfer.config import parse_override


def next_larger(times: Mapping[int, float], rows: int) -> float | None:
    """Returns the seconds of the smallest captured step that has so many rows; None for none."""
    sizes = [size for size in times if size >= rows]
    return times[min(sizes)] if sizes else None


def rates(
    plain: Mapping[int, float], ahead: Mapping[int, float], streams: int, kept: Sequence[float]
) -> list[float]:
    """Returns the tokens a second of all streams with 0, 1, ... drafts each, as far as there are
    steps of so many rows; `plain`, `ahead`: seconds by rows, without and with lookahead."""
    found = []
    for drafts in range(len(kept) + 1):
        seconds = next_larger(ahead if drafts else plain, streams * (1 + drafts))
        if seconds is not None:
            found.append(streams * (1.0 + sum(kept[:drafts])) / seconds)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--acceptance", default="0.80,0.62,0.48")
    parser.add_argument("--streams", default="1,8,32,64,128")
    parser.add_argument("--set", action="append", default=[], type=parse_override)
    options = parser.parse_args(arguments)
    kept = [float(part) for part in options.acceptance.split(",")]
    settings = {"scheduler.max_num_seqs": 512} | dict(options.set)
    with LLM(options.model, settings=settings, progress=False) as llm:
        times = llm.frontend.engines[0].report.step_times
    plain, ahead = (
        {rows: seconds for rows, seconds, is_ahead in times if is_ahead is wanted}
        for wanted in (False, True)
    )
    print("| rows | plain ms | lookahead ms |\n|--:|--:|--:|")
    for rows in sorted({*plain, *ahead}):
        cells = (f"{of[rows] * 1e3:.3f}" if rows in of else "" for of in (plain, ahead))
        print(f"| {rows} | {' | '.join(cells)} |")
    print("\n| streams | tokens/s with 0, 1, ... drafts |\n|--:|---|")
    for streams in map(int, options.streams.split(",")):
        found = rates(plain, ahead, streams, kept)
        print(f"| {streams} | {', '.join(f'{rate:.0f}' for rate in found)} |")


if __name__ == "__main__":
    main()
