"""A rank that is told to end, with some seconds' notice, leaves after its step: nobody is interrupted, nothing is lost.

Spot instances, schedulers before a job's time is up, and Kubernetes before it evicts a pod send SIGTERM, and SIGKILL
some time later. In a job that goes on without ranks that are lost, this one need not be lost in the middle of a step:

- The signal's handler only takes a note.
- The next pass of gradients carries the note to all ranks, in a number that travels with them anyway. So all know it
  at the end of the same pass, to which the gradients of the leaving rank belong. They agree who leaves (members.py).
- That rank ends with exit status 0, from the call that ended the pass, mostly `backward()`. The others drop it from
  their communicators, where all stand between two operations, and go on with their step. Between hosts, some may not
  have heard yet who leaves, so all, also those that leave, agree on the members that are left (control/consensus.py).

A second SIGTERM ends the process at once, as does any before there is a job or where the script has a handler of its
own. So a rank that is in no step, or in one that takes longer than the notice, is killed and counts as lost.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

#: The exit status of a job that ends because ranks were told to, as a shell reports it for a process.
TERMINATED = 128 + signal.SIGTERM


class PreemptionNotice:
    """Whether this process was told to end.

    Attributes:
        given: whether it was told so since `install`.
        is_installed: whether SIGTERM counts as the notice.
    """

    def __init__(self) -> None:
        self.given = False
        self._pid = os.getpid()
        self.is_installed = False

    def install(self) -> None:
        """Take SIGTERM for a preemption notice from now on, unless the script has another use for it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self.is_installed = True

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.given or os.getpid() != self._pid:  # a forked child, such as a data loader's worker, is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.given = True

    def close(self) -> None:
        """Let SIGTERM end this process again."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self.is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_installed = False
