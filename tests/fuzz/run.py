"""Fuzz the parsers: `python -m tests.fuzz.run --inputs 1000000`, or one of them, or one input again.

Prints inputs per second, the longest input's milliseconds and the growth of memory for each target, and ends with
status 1 after a finding, with the command that repeats it. `--save` writes the input to seeds/TARGET.
"""

import argparse
import logging
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.fuzz.targets import _SEEDS, TARGETS, Target

#: Seconds of this process's own time after which inputs count as endless; other work on the machine does not count. One
#: that only waits is ended by the clock.
_ENDLESS, _WAITS = 10, 300


class Finding(Exception):
    """An input that a parser did not withstand."""


def fuzz(target: Target, inputs: range, guard: Callable[[], object] = lambda: None) -> float:
    """Run a target on the inputs with these numbers; returns the longest one's seconds.

    Args:
        target, inputs: what to run.
        guard: called now and then, to start the time again that an input may take.

    Raises:
        Finding: a parser raised something else than our errors, understood an input wrongly, or did not end.
    """
    longest, now = 0.0, time.perf_counter()
    for number in inputs:
        if number % 256 == 0:
            guard()
        rng = random.Random(f"{target.name} {number}")
        data = target.input(rng)
        try:
            target.run(data, rng)
        except target.raises:
            pass
        except Exception as error:
            raise Finding(f"{target.name}, input {number}, {data[:200]!r}: {error!r}") from error
        before, now = now, time.perf_counter()
        longest = max(longest, now - before)
    return longest


def _end(number: int, frame: FrameType | None) -> None:
    raise RuntimeError(f"256 inputs took more than {_ENDLESS} s of the processor, or {_WAITS} s")


def _set_alarm(seconds: float, waits: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, shared by the targets")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--target", help="only this one")
    parser.add_argument("--only", type=int, help="only the input with this number")
    parser.add_argument("--save", action="store_true", help="keep the input of --only as a seed")
    asked = parser.parse_args()
    chosen: list[Any] = [make for make in TARGETS if asked.target in (None, make.__name__)]
    numbers = range(asked.first, asked.first + asked.inputs // len(chosen))
    if asked.only is not None:
        numbers = range(asked.only, asked.only + 1)
    failed = False
    for one in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(one, _end)
    for make in chosen:
        target = make()
        began, memory = time.perf_counter(), _mebibytes()
        try:
            try:
                longest = fuzz(target, numbers, lambda: _set_alarm(_ENDLESS, _WAITS))
            finally:
                _set_alarm(0, 0)  # what follows may take as long as it likes
        except Finding as finding:
            failed = True
            traceback.print_exception(finding.__cause__)
            print(finding, file=sys.stderr)
        else:
            rate = len(numbers) / (time.perf_counter() - began)
            print(
                f"{target.name:17} {len(numbers):8,} inputs  {rate:7,.0f} a second  longest {longest * 1e3:6.1f} ms  "
                f"memory +{_mebibytes() - memory:.1f} MiB",
                flush=True,
            )
        if asked.save and asked.only is not None:
            rng = random.Random(f"{target.name} {asked.only}")
            (_SEEDS / target.name).mkdir(parents=True, exist_ok=True)
            (_SEEDS / target.name / str(asked.only)).write_bytes(target.input(rng))
        target.close()
    sys.exit(1 if failed else 0)


def _mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    logging.getLogger("ring_plugins").setLevel(logging.CRITICAL)  # not in main(), which a test calls
    main()
