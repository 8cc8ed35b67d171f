"""What a container's first process owes to the others in it: pass signals on, collect the dead.

The kernel gives process 1 no default action for signals, and every process whose parent has ended
as a child. So there the program runs in a child of its own, with the usual rules.
"""

from __future__ import annotations

import contextlib
import os
import signal

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_SIGNAL_STATUS = 128


def leave_process_1() -> None:
    """Go on in a child if this is process 1; call it before any thread or gRPC object exists.

    Process 1 itself never returns: it ends with the child's exit status, 128 and the number of the
    signal that killed it, as shells do.
    """
    if os.getpid() != 1:
        return
    # Blocked until they can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _pass_on(received, child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else _SIGNAL_STATUS - code)


def _pass_on(number: int, child: int) -> None:
    # It may have ended a moment ago.
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)
