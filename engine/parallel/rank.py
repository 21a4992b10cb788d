"""`python -m engine.parallel.rank`: one of the ranks that rank 0 starts. It does what comes down its standard input.

    first frame     RankSetup         it loads its share of the model and joins the group
    every other     StepOrder         it makes the moves and its part of the forward; the logits are for rank 0 alone
    end of input    rank 0 is gone, or done with it

Standard output carries one frame where it fails: why. Whatever else prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import IO

import msgspec

from engine.config import EngineConfig
from engine.parallel.frames import read_frame, write_frame
from engine.parallel.order import StepOrder


class RankSetup(msgspec.Struct, frozen=True):
    rank: int
    port: int  # of the store where the ranks meet
    folder: str  # of the model
    config: EngineConfig


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer)
    except Exception as error:
        write_frame(answers, f"{type(error).__name__}: {error}".encode())
        return 1
    return 0


def serve(orders: IO[bytes]) -> None:
    first = read_frame(orders)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=RankSetup)
    from engine.parallel.load import load_rank  # torch is a matter of seconds

    group, runner = load_rank(setup)
    decoder = msgspec.msgpack.Decoder(StepOrder)
    while (order := read_frame(orders)) is not None:
        runner.forward(decoder.decode(order))
    group.close()


if __name__ == "__main__":
    sys.exit(main())
