"""A child that outlives nobody: it dies with the process that started it, even where that one was killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

VARIABLE = "MILLSTREAM_TETHER"  # the process id of the parent to die with
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tether(environment: Mapping[str, str]) -> None:
    """Ties this process to its parent, where the parent asks for it in `MILLSTREAM_TETHER`.

    The kernel sends the signal when the parent's thread that started this process ends; a parent that died before the
    request was made is noticed by its id.
    """
    parent = environment.get(VARIABLE)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
