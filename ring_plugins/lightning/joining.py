"""A Trainer that a process joins in the place of a lost rank: `on_failure="replace"`.

The process runs the script from its first line, and comes to ``fit`` while the others train. Until it joins, its
strategy answers as if all ranks had the same (`parallel`), so everything that Lightning does before the first batch
meets nobody: broadcasts of directories, barriers, numbers of batches, hooks.

**Where.** All meet where `_TrainingEpochLoop` is about to fetch a batch. There is no strategy hook and no callback hook
between two batches that has neither a batch in hand nor a part of the last one undone (validation, schedulers), so
`advance` of this Trainer's loop is wrapped. The members are in the middle of their epoch there, and the new process at
the first batch of its first. It takes over the state of a member, the position in the epoch too, and what Lightning
does next is the same for all. Processes by which the job grows join where an epoch is about to begin, before `FitLoop`
sets up its data: all make their loaders anew there, with samplers for the larger number of ranks.

**What.** The state is Lightning's own checkpoint, in memory, which has weights, optimizers, schedulers, the scaler, the
loops' progress and callbacks. Beside it: what a checkpoint leaves out because a Trainer that starts again makes it
anew, but members do not. All members make the checkpoint, before they let anybody join, since hooks such as
``on_save_checkpoint`` may use collectives.

Considered and rejected: to let the Trainer restore from a file or from ``ckpt_path``, whose restart in the middle of an
epoch skips or repeats hooks and validation by rules of its own (`RestartStage`), and which is over before the first
batch is due; and to join at the start of an epoch only, which leaves the slot empty for up to an epoch.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.joining.join import admit, if_different, join
from ring_plugins.core.joining.state_transfer import fails_alone
from ring_plugins.core.world import current
from ring_plugins.lightning.recovery import take_versions, versions_of
from ring_plugins.torch.loaders import divide_anew
from ring_plugins.torch.training_state import share_state, take_trained_parts, trained_parts

#: What `ModelCheckpoint` of Lightning 2.6.6 decides by and leaves out of its state.
_OF_CHECKPOINTS = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
_OF_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class MeetingPoint:
    """Lets processes join a Trainer between two batches, from now until `close`.

    Args:
        strategy: the Trainer's.
        trainer: about to run ``fit``.

    Raises:
        ArgumentError: validation is due by the clock.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        if getattr(trainer, "_val_check_time_interval", None) is not None:  # since Lightning 2.6
            raise ArgumentError(
                f"Trainer(val_check_interval=...) as a time (of {trainer._val_check_time_interval:g} s) does not "
                'support on_failure="replace", since a process that joins has another clock. Pass a number of batches.'
            )
        self._strategy, self._trainer = strategy, trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._advance: Callable[[Any], None] = self._loop.advance
        self._begin_epoch: Callable[[], None] = trainer.fit_loop.on_advance_start
        self._sanity_steps = trainer.num_sanity_val_steps
        self._loop.advance = self._meet_and_advance
        trainer.fit_loop.on_advance_start = self._meet_and_begin_epoch
        if current().is_joining:
            trainer.num_sanity_val_steps = 0  # the others' validation has worked
            # Lightning has not restored them yet from `ckpt_path`: a member has newer ones.
            trainer._checkpoint_connector._loaded_checkpoint = {}

    def close(self) -> None:
        """Undo everything."""
        del self._loop.advance, self._trainer.fit_loop.on_advance_start
        self._trainer.num_sanity_val_steps = self._sanity_steps

    def _meet_and_advance(self, fetcher: Any) -> None:
        world = current()
        if world.is_joining:
            self._join(fetcher)
        elif world.elastic.is_pending and self._let_join(fetcher):
            world.elastic.tell_changes()
        self._advance(fetcher)

    def _meet_and_begin_epoch(self) -> None:
        """As `_meet_and_advance`, for processes by which the job grows, where an epoch is about to begin."""
        world = current()
        is_added = world.elastic.is_added
        if is_added:
            self._receive_state(None)
        if is_added or (world.elastic.pending and self._let_join(None)):
            self._divide_anew()
            world.elastic.tell_changes()
        self._begin_epoch()

    def _let_join(self, fetcher: Any) -> bool:
        """Let processes join that wait here: for the places of lost ranks in an epoch, to be added between two."""
        state = self._state()
        joined = admit(self._place(fetcher), lost=fetcher is not None, added=fetcher is None)
        if joined:
            share_state(lambda: state, joined)
            self._agree_on_random_numbers(None)
        return bool(joined)

    def _divide_anew(self) -> None:
        """Make all loaders anew, for the number of ranks that there are now; collective."""
        fit_loop = self._trainer.fit_loop
        for loader in fit_loop._combined_loader.flattened:
            divide_anew(loader)  # if its sampler is the script's own, to which Lightning adds none
        fit_loop._combined_loader = fit_loop.epoch_loop.val_loop._combined_loader = None
        fit_loop.setup_data()
        if told := if_different(self._trainer.num_training_batches):
            raise MismatchError(
                f"ranks have different numbers of training batches since the job has grown: {told}. Let Lightning add "
                "the samplers, or make a DistributedSampler in train_dataloader(), with trainer.world_size."
            )

    def _join(self, fetcher: Any) -> None:
        if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
            raise ArgumentError(
                'a module whose training_step takes dataloader_iter does not support on_failure="replace": let it take '
                "batches."
            )
        self._receive_state(fetcher)
        current().elastic.tell_changes()
        if self._strategy.is_global_zero:
            self._show_progress()

    def _receive_state(self, fetcher: Any) -> None:
        """Join, and take over the others' state; their position in an epoch, too, if a fetcher is given."""
        # Unless the script has its own, Lightning's handler for SIGTERM gives way to that of a member, which leaves
        # after its step. At the end of `fit` Lightning 2.6.6 restores what it found (signal_connector.py:126).
        before_fit = self._trainer._signal_connector._original_handlers
        is_main = threading.current_thread() is threading.main_thread()
        gives_way = is_main and before_fit.get(signal.SIGTERM) is signal.SIG_DFL
        if gives_way:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        until = f"begin the next {'epoch' if fetcher is None else 'batch'}"
        joined = join(self._place(fetcher), until)
        if gives_way:
            before_fit[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
        with fails_alone():
            state = share_state(dict, joined)
            assert state is not None
            with self._strategy.as_if_alone():
                self._load(state)
                if fetcher is not None:
                    self._load_data(state, fetcher)
        self._agree_on_random_numbers(state["random"])

    def _place(self, fetcher: Any) -> str:
        """What has to be the same in a process that joins, between two batches or, without a fetcher, two epochs."""
        callbacks = [type(callback).__name__ for callback in self._trainer.callbacks]
        if fetcher is None:
            return f"fit(), before an epoch, with {', '.join(callbacks) or 'no callbacks'}"
        # Loaders that are made anew may have another number in this epoch; `_load_data` compares then.
        is_open = self._trainer.reload_dataloaders_every_n_epochs or current().elastic.may_grow
        batches = "?" if is_open else self._trainer.num_training_batches
        return f"fit() with {batches} training batches per epoch, and {', '.join(callbacks) or 'no callbacks'}"

    # The state ------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        trainer, fit_loop, connector = self._trainer, self._trainer.fit_loop, self._trainer._logger_connector
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # positions in this rank's data
        val_loop = fit_loop.epoch_loop.val_loop
        return {
            "checkpoint": checkpoint,
            "metrics": {name: dict(getattr(connector, name)) for name in _OF_METRICS},
            "checkpoints": [
                {name: value for name, value in vars(one).items() if name in _OF_CHECKPOINTS}
                for one in trainer.checkpoint_callbacks  # some are no `ModelCheckpoint`
            ],
            "loggers": versions_of(trainer.loggers),
            "batches": trainer.num_training_batches,
            "data": self._strategy._mid_epoch.state(goes_back=False),
            "reloads": (fit_loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch),
            "validates": val_loop._combined_loader is not None,
            "stops": trainer.should_stop,
            "accumulates": trainer.accumulate_grad_batches,  # which callbacks change where an epoch begins
            "random": _random_states(),
            "trained": trained_parts(self._parts()),
        }

    def _parts(self) -> dict[str, Any]:
        return {"": self._trainer.lightning_module, **{str(i): one for i, one in enumerate(self._trainer.optimizers)}}

    def _load(self, state: dict[str, Any]) -> None:
        trainer, fit_loop, connector = self._trainer, self._trainer.fit_loop, self._trainer._logger_connector
        for callback, values in zip(trainer.checkpoint_callbacks, state["checkpoints"], strict=True):
            vars(callback).update(values)
        restore = trainer._checkpoint_connector
        restore._loaded_checkpoint = state["checkpoint"]
        restore.restore_datamodule()
        restore.restore_model()
        restore.restore_callbacks()
        for callback in trainer.callbacks:
            if hasattr(callback, "_internal_optimizer_metadata"):  # a BaseFinetuning of Lightning 2.6.6, of either name
                callback._restarting = False  # or the next fit would give optimizers the groups of this one
        take_trained_parts(self._parts(), state["trained"])
        restore.restore_training_state()
        for callback in trainer.callbacks:
            if hasattr(callback, "_swa_scheduler"):
                self._begin_to_average_weights(callback)
        restore._loaded_checkpoint = {}
        _go_on(fit_loop)
        take_versions(trainer.loggers, state["loggers"])
        for name, metrics in state["metrics"].items():
            getattr(connector, name).update(metrics)
        trainer.should_stop, trainer.accumulate_grad_batches = state["stops"], state["accumulates"]

    def _begin_to_average_weights(self, callback: Any) -> None:
        """Be as a `StochasticWeightAveraging` of Lightning 2.6.6 which has exchanged the scheduler, if theirs has."""
        trainer = self._trainer
        had_begun, epoch = callback._scheduler_state is not None, trainer.current_epoch
        if had_begun and callback.swa_start <= epoch <= callback.swa_end:
            callback._initialized, callback.n_averaged = False, None  # this process may have begun in epoch 0
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            # The new scheduler has changed the rates, and the members' state of it was loaded into the script's one.
            trainer._checkpoint_connector.restore_optimizers_and_schedulers()
        callback._scheduler_state = None  # or the next fit would remove the script's schedulers

    def _load_data(self, state: dict[str, Any], fetcher: Any) -> None:
        """Be where the members are in the training data, and have validation data if they have."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        val_loop = fit_loop.epoch_loop.val_loop
        # That of the first epoch may be another one, and the job may have grown since this process made it.
        if trainer.reload_dataloaders_every_n_epochs or len(current().members.past_shards) > 1:
            for loader in fit_loop._combined_loader.flattened:
                divide_anew(loader)
            fit_loop._combined_loader = None
            fit_loop.setup_data()
            fetcher.setup(fit_loop._combined_loader)
            fit_loop._data_fetcher = fetcher  # epoch_loop.run has this one in hand
        if trainer.num_training_batches != state["batches"]:
            raise MismatchError(
                f"this process has {trainer.num_training_batches} training batches per epoch, and the ranks that it "
                f"has joined have {state['batches']}. Make data loaders in the same way on all ranks."
            )
        val_loop._combined_loader = None
        if state["validates"]:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        fit_loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch = state["reloads"]
        self._strategy._mid_epoch.join(state["data"], fetcher)

    def _agree_on_random_numbers(self, states: dict[str, Any] | None) -> None:
        """Go on with the members' random numbers where all have the same, as after ``seed_everything``; collective.

        Args:
            states: a member's, in a process that has joined.
        """
        own = None if states is not None else {name: _digest(state) for name, state in _random_states().items()}
        found = [one for one in current().communicator.all_gather_object(own, "random numbers") if one is not None]
        for name, state in (states or {}).items():
            if len({of_member[name] for of_member in found}) == 1:
                _TAKE_STATE[name](state)

    def _show_progress(self) -> None:
        """Let the progress bar, which was off while this process was not rank 0, begin in the middle of the epoch."""
        bar, module = self._trainer.progress_bar_callback, self._trainer.lightning_module
        if bar is not None:
            bar.enable()
            bar.on_train_start(self._trainer, module)
            bar.on_train_epoch_start(self._trainer, module)


_TAKE_STATE: dict[str, Callable[[Any], Any]] = {
    "python": random.setstate, "numpy": np.random.set_state, "torch": torch.random.set_rng_state,
}  # fmt: skip


def _random_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.random.get_rng_state()}


def _digest(state: Any) -> str:
    plain = state.numpy() if isinstance(state, torch.Tensor) else state
    return hashlib.blake2b(pickle.dumps(plain)).hexdigest()


def _go_on(loop: Any) -> None:
    """Let a loop and those inside it go on where they are: loading their state has told them to start again."""
    loop.on_iteration_done()
    for inner in vars(loop).values():
        if hasattr(inner, "on_iteration_done"):
            _go_on(inner)
