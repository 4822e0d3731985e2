"""Local updates in Lightning: hosts exchange weights every so many steps (`RingStrategy(sync_every=...)`).

Inside a host all is as ever: the averager, the comparison of loops, uneven data and buffers work in the group of its
ranks. So hosts are at different batches, by different shares of data or by time. Where they come together, before
validation, at the end of an epoch, for a checkpoint and at the end, they exchange all: who is early takes part in the
others' exchanges until they come, and then all ranks have the same weights, of which any may save or validate its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.local_settings import Settings
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.lightning.preemption import Preemption, is_agreed
from ring_plugins.torch.local_updates import BetweenHosts, floating_buffers


def local_settings(
    arguments: Mapping[str, Any], steps: int | None = None, strategy: str = "RingStrategy"
) -> Settings | None:
    """How hosts exchange, by the arguments of a strategy; None if they average every step.

    Args:
        arguments: by name.
        steps: of the whole training, if known.
        strategy: its name.

    Raises:
        ArgumentError: an argument is invalid, or needs `sync_every`, or does not work with it.
    """
    every, shards = arguments["sync_every"], arguments["shard_optimizer"]
    if every is not None and shards:
        raise ArgumentError(
            f"{strategy}(sync_every={every!r}) does not work with shard_optimizer={shards!r}: leave one out. "
            "ring_plugins.torch.LocalUpdates(shard=True) shards inside a host."
        )
    compression = Compression.named(arguments["compression"], arguments["error_feedback"])
    outer, fragments, delay = (arguments[name] for name in ("outer", "fragments", "delay"))
    return Settings.wanted(strategy, every, outer, fragments, compression, steps, delay)


class _Rounds(BetweenHosts):
    """Exchanges that tell all hosts what signals have told one rank, and after which all Trainers stop then.

    Attributes:
        preemption: returns that of this Trainer, which is made later.
    """

    preemption: Callable[[], Preemption | None]

    def wants_change(self) -> int:
        return 0 if (own := self.preemption()) is None else own.told

    def follow_changes(self, wanted: int) -> bool:
        if wanted and (own := self.preemption()) is not None:
            own.agree(wanted)
        return wanted > 0


class LocalTraining:
    """The exchanges of one `fit`, or of a module that Fabric has set up. Collective.

    Args:
        module: what is trained.
        arguments: of the strategy.
        group: the ranks that train together, all by default.
        preemption: returns what follows a Trainer's signals.
        steps: of the whole training, if known.

    Attributes:
        team: the ranks of this host.
        averager_arguments: what the averager inside the host takes in place of the strategy's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        arguments: Mapping[str, Any],
        group: Group | None,
        preemption: Callable[[], Preemption | None] = lambda: None,
        steps: int | None = None,
    ) -> None:
        current().refuse_to_recover("RingStrategy(sync_every=...), unlike a loop with ring_plugins.torch.LocalUpdates,")
        self._module = module
        settings = local_settings(arguments, steps)
        assert settings is not None
        described = [(name, tuple(one.shape), str(one.dtype)) for name, one in self._module.named_parameters()]
        planned = steps / settings.every if steps is not None and settings.every else float("inf")
        self._rounds = _Rounds(settings, described, group, planned=planned)
        self._rounds.preemption = preemption
        self.team = self._rounds.team
        self.averager_arguments = {"compression": None, "error_feedback": None, "group": self.team}

    def before_step(self) -> None:
        """Take the anchor before the first step of an optimizer."""
        self._rounds.start([*self._module.named_parameters()], floating_buffers(self._module))

    def after_step(self) -> None:
        """Count a step, and exchange what is due; also after one that was skipped, since other hosts have taken it."""
        self._rounds.after_step()

    def exchange(self) -> None:
        """Give all ranks the same weights, once all are here.

        Raises:
            SIGTERMException: the job ends, and hosts are not at the same place. Not if this is called because of it.
        """
        self.before_step()
        self._rounds.exchange()
        error, preemption = sys.exc_info()[1], self._rounds.preemption()
        if self._rounds.is_over and preemption is not None and not (error is not None and is_agreed(error)):
            preemption.stop(preemption.told)

    def finish(self) -> None:
        """As `exchange`, at the end, where nobody has to stop."""
        self.before_step()
        self._rounds.finish()

    def save_into(self, state: dict[str, Any]) -> None:
        """Add the outer optimizer's state to an optimizer's, behind an exchange."""
        if saved := self._rounds.saved():
            state["local_updates"] = saved

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from an optimizer's state that `save_into` added to; the anchor becomes the module's weights."""
        if "local_updates" in state:
            named = [*self._module.named_parameters()]
            self._rounds.resume(state["local_updates"], named, floating_buffers(self._module))

    def close(self) -> None:
        """End the communication."""
        self._rounds.close()
