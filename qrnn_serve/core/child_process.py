"""What a process that the server starts does about signals and about the server's end."""

from __future__ import annotations

import ctypes
import signal

# Of prctl(2).
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ignore SIGINT and SIGTERM; the kernel kills this process when what started it ends.

    Those signals may go to all processes of a container or a terminal; the server drains first and
    then closes the socket, which tells this process to end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
