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

**A job that ends as a whole** saves a checkpoint first: one that does not go on after losses, or that would have too
few ranks left, or that SIGUSR1 tells of its last minutes (`sbatch --signal=USR1@120`). Only the script can save, so it
asks at the end of each step (`is_asked`). The same number carries the note, so all ranks get the same answer in the
same step (`Elastic.is_preempted`). Who is asked takes no second signal for an order to end at once: schedulers and
launchers often send the same one, each for itself.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

#: The exit status of a job that ends because ranks were told to, as a shell reports it for a process.
TERMINATED = 128 + signal.SIGTERM


def _end_first_process(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


class PreemptionNotice:
    """Whether this process was told to end.

    Attributes:
        given: whether it was told so since `install`.
        of_job: whether it was told that the whole job is to end.
        is_installed: whether SIGTERM counts as the notice.
        is_asked: whether the script, or a framework's loop, asks for it and ends in an orderly way.
    """

    def __init__(self) -> None:
        self.given = self.of_job = self.is_asked = False
        self._pid = os.getpid()
        self.is_installed = self._was_installed = False
        self._end_as_first_process()

    def _end_as_first_process(self) -> None:
        """Let SIGTERM end a container's first process, for which the kernel ignores signals that have no handler."""
        if self._pid == 1 and self._may_take(signal.SIGTERM):
            signal.signal(signal.SIGTERM, _end_first_process)

    def install(self) -> None:
        """Take SIGTERM for a preemption notice from now on, unless the script has another use for it."""
        self.is_installed |= self._take(signal.SIGTERM)

    def ask(self) -> None:
        """Take signals for a notice that the script asks for: SIGTERM, and SIGUSR1 in a job of SLURM."""
        if not self.is_asked:
            self.is_asked, self._was_installed = True, self.is_installed
            self.install()
            if "SLURM_JOB_ID" in os.environ:  # elsewhere it has other uses, such as to print stacks
                self._take(signal.SIGUSR1)

    def _take(self, number: signal.Signals) -> bool:
        takes = self._may_take(number)
        if takes:
            signal.signal(number, self._note)
        return takes

    @staticmethod
    def _may_take(number: signal.Signals) -> bool:
        """Whether this thread may handle a signal for which the script has no handler."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(number) in (signal.SIG_DFL, _end_first_process)

    def _note(self, number: int, _: FrameType | None) -> None:
        is_repeated = self.given and not self.is_asked
        if is_repeated or os.getpid() != self._pid:  # a forked child, such as a data loader's worker, is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            _end_first_process(number, None)  # the kernel has ignored it
        if number == signal.SIGTERM:
            self.given = True
        else:
            self.of_job = True

    def withdraw(self) -> None:
        """Ask no longer: signals do what they did before `ask`, and so does one that has come and was not heeded."""
        was_installed, given = self._was_installed, self.given or self.of_job
        if was_installed:
            self.is_asked = False
            return
        self.close()
        if given and os.getpid() == self._pid:
            self.given = self.of_job = False
            os.kill(self._pid, signal.SIGTERM)

    def close(self) -> None:
        """Let the signals end this process again."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        self._end_as_first_process()
        self.is_installed = self.is_asked = False
