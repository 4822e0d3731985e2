"""Where in a step on GPUs a rank kills itself: `RANK:POINT:STEP ...`.

In "forward", before its "first" bucket is launched, in the middle of "backward", at its "end" before it waits, "after"
it has told the others that its GPU is done, or before its "update".
"""

import os
import signal
from collections.abc import Sequence

from torch import nn

from ring_plugins.core.gpu.recovery import GpuRecovery


class Deaths:
    """
    Args:
        arguments: as above.
        own: rank of this process, which dies at most once.

    Attributes:
        averaged: world ranks of those whose gradients are in the last average.
    """

    def __init__(self, arguments: Sequence[str], own: int) -> None:
        faults = (one.split(":") for one in arguments)
        self._points = {int(step): point for rank, point, step in faults if int(rank) == own}
        self._now, self.averaged = "", [own]
        wait_for, settle = GpuRecovery.wait_for, GpuRecovery._settle

        def wait_for_averages(recovery: GpuRecovery, *args: object) -> None:
            self.at("end")
            wait_for(recovery, *args)  # type: ignore[arg-type]
            self.averaged = [*recovery._host.ranks]  # a rank that dies from now on has taken part

        def settle_and_die(recovery: GpuRecovery, *args: object) -> None:
            settle(recovery, *args)  # type: ignore[arg-type]
            self.at("after")

        GpuRecovery.wait_for, GpuRecovery._settle = wait_for_averages, settle_and_die  # type: ignore[method-assign]

    def follow(self, middle: nn.Module, last: nn.Parameter) -> None:
        """Know when backward comes to a layer, and to the parameter whose gradient is the first."""
        middle.register_full_backward_hook(lambda *_: self.at("backward"))
        last.register_hook(lambda _: self.at("first"))

    def begin(self, step: int) -> None:
        self._now = self._points.get(step, "")
        self.at("forward")

    def at(self, point: str) -> None:
        if point == self._now:
            os.kill(os.getpid(), signal.SIGKILL)
