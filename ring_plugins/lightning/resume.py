"""A `fit` from a checkpoint in the middle of an epoch reads what is left of that epoch.

**Problem.** Lightning counts on where the checkpoint was, but its loaders begin anew: the first samples are read twice,
and the last ones never. With another number of ranks, the numbers of batches do not fit either. Where workers fetch
ahead, they have begun with the order of epoch 0, since samplers hear of the epoch later.

**Here** a checkpoint says how far the ranks have come in the order of each loader (`ring_plugins.torch.order`), and
`fit` goes on there with as many ranks as there are. If gradients accumulate, the place is behind the last step, as the
gradients of the batches since then are in no checkpoint. The epoch ends with as many batches as are left: with another
number of ranks, Lightning's own count continues at another number, so that it ends where it always does.

A checkpoint of another strategy does not say of how many ranks it is, so it is taken for one of as many as there are.

Lightning 2.6.6 has no hook for this: methods of its loops are replaced in the Trainer's own objects, as in `same_loop`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch

import ring_plugins.core.functions as ring
from ring_plugins.core.base.log import logger
from ring_plugins.lightning.global_batch import StepLoader
from ring_plugins.lightning.launcher import has_failed
from ring_plugins.torch.loaders import samplers_of
from ring_plugins.torch.order import Resumption, division_of, length_of, position_of, resumed

#: What a checkpoint has of ours, and a rank's loaders of other kinds that know where they are, as torchdata's.
KEY, _STATES = "ring_plugins", "states"
_COUNTED = ("ready", "started", "processed", "completed")


class MidEpoch:
    """Knows where a `fit` is in its data, and lets it go on there.

    Args:
        strategy: the Trainer's.
        trainer: the Trainer, in ``Strategy.setup``.
        loaded: the checkpoint from which it goes on, if there is one.
    """

    def __init__(self, strategy: Any, trainer: Any, loaded: Mapping[str, Any] | None) -> None:
        self._strategy, self._trainer, self._loaded = strategy, trainer, loaded
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._reset, self._start, self._reset_epoch = self._fit.reset, self._epoch.on_run_start, self._epoch.reset
        self._rest: list[Resumption] = []  # by loader, in the epoch that goes on
        self._first = self._longer = 0  # batches before it went on, and by how many it is longer than others
        self._told: Mapping[str, Any] = {}
        self._random: torch.Tensor | None = None
        self._states: dict[int, dict[int, Any]] = {}  # by batches fetched, of loaders that know where they are
        self._fit.reset, self._epoch.on_run_start = self._reset_fit, self._start_epoch
        self._epoch.reset = self._reset_quietly

    def close(self) -> None:
        """Leave the loops as they were."""
        vars(self._fit).pop("reset", None)
        for name in ("on_run_start", "reset"):
            vars(self._epoch).pop(name, None)

    @property
    def _ranks(self) -> int:
        if (steps := self._strategy._global_batch) is not None:  # as many as make a batch of a step each
            return int(steps.passes)
        return int(self._strategy.distributed_sampler_kwargs["num_replicas"])

    def state(self, goes_back: bool = True) -> dict[str, Any]:
        """Where all ranks are; collective if a loader keeps a state of its own.

        Args:
            goes_back: whether to the last step, if gradients are being accumulated.
        """
        total, done, combined = self._fit.max_batches, self._epoch.batch_progress.current.processed, None
        passes = self._trainer.accumulate_grad_batches if self._trainer.lightning_module.automatic_optimization else 1
        done -= done % passes if goes_back and done < total else 0
        found: dict[str, Any] = {"batches": done, "total": total, "ranks": self._ranks, "loaders": []}
        if self._ranks == 1:  # orders of later epochs are drawn from them
            found["random"] = torch.get_rng_state()
        if done < total and (combined := self._fit._combined_loader) is not None:
            is_cycled = combined._mode == "max_size_cycle"
            found["loaders"] = [self._position(i, done, is_cycled) for i in range(len(combined.flattened))]
        return found

    def _position(self, number: int, done: int, is_cycled: bool) -> dict[str, Any]:
        loader = self._fit._combined_loader.flattened[number]
        if _keeps_state(loader):
            state = self._states[done][number] if done in self._states else loader.state_dict()
            is_alone = self._strategy.world_size == 1 or has_failed()
            states = [state] if is_alone else ring.all_gather_object(state, group=self._strategy.group)
            return {_STATES: states, "ranks": self._ranks}
        batches, begun = done - self._first, 0
        if self._rest:
            begun, left = self._rest[number].begun, self._rest[number].batches
            if is_cycled and left is not None and batches > left:
                batches, begun = batches - left, 0
        if is_cycled and not begun and batches and (length := length_of(loader)):
            batches = (batches - 1) % length + 1
        if isinstance(loader, StepLoader):
            return loader.position(batches, begun)
        return position_of(loader, batches, self._ranks, begun)

    # Going on -------------------------------------------------------------------------------------

    def _reset_fit(self) -> None:
        if self._loaded is not None and self._fit._combined_loader is not None:
            self._set_epoch(self._fit.epoch_progress.current.processed)
            self._told = self._loaded.get(KEY) or self._of_others(self._loaded)
            if self._told["ranks"] != self._ranks and self._told["batches"] >= self._told["total"]:
                self._count(self._fit.max_batches)
            elif self._fit.restarting and self._has_begun() and self._told["batches"] < self._told["total"]:
                self._place(self._told)
        self._reset()

    def _has_begun(self) -> bool:
        """Whether the checkpoint is of the middle of an epoch, perhaps behind no step of it."""
        return bool(self._epoch.batch_progress.current.processed)

    def _set_epoch(self, epoch: int) -> None:
        for loader in self._fit._combined_loader.flattened:
            for sampler in (*samplers_of(loader), getattr(loader, "batch_sampler", None)):
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(epoch)

    def _of_others(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """What `state` would have returned when another strategy saved a checkpoint."""
        found = self.state()
        states = loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
        keeping = [i for i, one in enumerate(self._fit._combined_loader.flattened) if hasattr(one, "load_state_dict")]
        for number, state in zip(keeping, states, strict=False):
            if _STATES in found["loaders"][number]:
                found["loaders"][number] = {_STATES: [state] * self._ranks, "ranks": self._ranks}
        return found

    def _place(self, told: Mapping[str, Any]) -> None:
        """Let the next iteration of each loader begin where the ranks were; count on so that the epoch ends in time."""
        combined = self._fit._combined_loader
        pairs = zip(combined.flattened, told["loaders"], strict=True)
        self._rest = [self._resumed(loader, position) for loader, position in pairs]
        combined.flattened = [one.loader for one in self._rest]
        self._random = told.get("random") if self._ranks == 1 else None
        for problem in {one.problem for one in self._rest if one.problem}:
            if self._strategy.is_global_zero:
                logger.warning(f"fit() goes on behind {told['batches']} batches of an epoch, but {problem}")
        done = told["batches"]
        is_other = told["ranks"] != self._ranks or isinstance(combined.flattened[0], StepLoader)
        if is_other and (left := self._left(told)) is not None:
            passes = self._trainer.accumulate_grad_batches
            longer = max(left - self._fit.max_batches, 0)
            longer += -(self._fit.max_batches + longer - left) % passes
            self._lengthen(longer)
            done = self._fit.max_batches - left
            self._count(done)
        self._first = done

    def _resumed(self, loader: Any, position: Mapping[str, Any]) -> Resumption:
        if isinstance(loader, StepLoader):
            return loader.resumed(position)
        states = position.get(_STATES, [])
        if len(states) == self._ranks and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(states[self._strategy.global_rank])
            return Resumption(loader, 0, None, None, None, "")
        return resumed(loader, position, self._ranks)

    def _left(self, told: Mapping[str, Any]) -> int | None:
        """How many batches are left of the epoch; None if nobody knows."""
        left = self._together([one.batches for one in self._rest])
        if left is None or self._fit.max_batches == float("inf"):
            return None
        if told["total"] < float("inf"):  # Trainer(limit_train_batches=...) may leave some out
            samples, of_batch = told["ranks"], self._ranks  # in batches of equal size
            first = self._fit._combined_loader.flattened[0]
            if isinstance(first, StepLoader) and (consumed := told["loaders"][0].get("consumed")):
                samples, of_batch = consumed, told["batches"] * first.plan.global_batch_size
            left = min(left, -(-(told["total"] - told["batches"]) * samples // of_batch))
        return left

    def _together(self, batches: list[int | None]) -> int | None:
        """How many items a combined loader has, of whose loaders so many batches are left."""
        combined, known = self._fit._combined_loader, [one for one in batches if one is not None]
        if len(known) < len(batches) or not known:
            return None
        lengths = [length_of(loader) or 0 for loader in combined.flattened]
        return min(known) if combined._mode == "min_size" else known[lengths.index(max(lengths))]

    def _count(self, done: int) -> None:
        current = self._epoch.batch_progress.current
        difference = done - current.processed
        for name in _COUNTED:
            setattr(current, name, getattr(current, name) + difference)

    def _lengthen(self, batches: int) -> None:
        """Let this epoch have more batches than others, or no longer."""
        trainer, before = self._trainer, self._fit.max_batches
        self._longer += batches
        self._fit.max_batches += batches
        if trainer.val_check_batch == before:
            trainer.val_check_batch = self._fit.max_batches

    def _reset_quietly(self) -> None:
        with warnings.catch_warnings():
            if self._rest:  # Lightning says that loaders cannot go on, which is not so here
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            self._reset_epoch()

    def _start_epoch(self, fetcher: Any) -> None:
        if self._loaded is not None:
            self._loaded = None
            self.begin(fetcher)
        else:
            self._rest, self._first = [], 0
            self._lengthen(-self._longer)
        self._start(fetcher)
        self._follow_states(fetcher)

    def _follow_states(self, fetcher: Any) -> None:
        """Note where loaders are that keep a state, as a checkpoint needs it: others have fetched ahead by then."""
        passes, loaders = self._trainer.accumulate_grad_batches, self._fit._combined_loader.flattened
        keeping = [number for number, loader in enumerate(loaders) if _keeps_state(loader)]
        self._states.clear()
        if not keeping or (fetcher.length is not None and passes == 1):
            return
        start = fetcher._start_profiler

        def note() -> None:
            done = fetcher.fetched
            self._states[done] = {number: copy.deepcopy(loaders[number].state_dict()) for number in keeping}
            self._states.pop(done - passes - 1, None)
            start()

        fetcher._start_profiler = note

    def begin(self, fetcher: Any) -> None:
        """Begin to iterate where the loaders are, whose workers may have begun elsewhere."""
        back = self._epoch.batch_progress.current.ready - self._first if self._rest else 0
        if back > 0:  # to the last step
            self._count(self._epoch.batch_progress.current.processed - back)
            self._epoch.batch_progress.total.increment_by(-back)
        if self._rest or not any(map(_keeps_state, self._fit._combined_loader.flattened)):
            iter(fetcher)
        if self._random is not None:
            torch.set_rng_state(self._random.cpu())
        draws = [one.draws for one in self._rest]
        if len(draws) == 1 and self._strategy._uneven is not None:
            self._strategy._uneven.rest = draws[0]
        own = self._together([one.own for one in self._rest])
        if own is not None and fetcher.length is not None:
            fetcher.length = min(self._epoch.batch_progress.current.ready + own, self._fit.max_batches)

    def join(self, told: Mapping[str, Any], fetcher: Any) -> None:
        """Be where the others are, which have told their `state`."""
        self._set_epoch(self._trainer.current_epoch)
        self._place(told)
        iter(fetcher)
        fetcher.fetched += told["batches"]


def _keeps_state(loader: Any) -> bool:
    """Whether the loader itself says where it is, and Lightning restores it.

    Of torchdata's loader this is left out where its order can be known, which goes on with any number of ranks. A class
    of the script's may skip batches by itself, so that its order is never moved, too.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    is_torchdatas = str(getattr(loader.load_state_dict, "__module__", "")).startswith("torchdata.")
    return not is_torchdatas or division_of(loader) is None
