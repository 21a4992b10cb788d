"""Ports for servers that are started here."""

from __future__ import annotations

import errno
import random
import socket

FIRST, LAST = 10_000, 32_000  # below those that systems give to outgoing connections
_NUM_TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on, and that no outgoing connection takes before the server does.

    Drawn from many, so that two who ask at once hardly get the same. Raises OSError where `host` is none of ours, and
    where no port is found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    draw = random.SystemRandom()
    for _ in range(_NUM_TRIES):
        port = draw.randrange(FIRST, LAST)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no free port between {FIRST} and {LAST} on {host}")
