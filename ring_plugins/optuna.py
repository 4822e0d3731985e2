"""One Optuna study for all ranks: rank 0 draws the values of each trial, and every rank gets them.

Each rank runs the whole script, and would draw values of its own. Here rank 0 has the study. The others follow it
through its trials, and whatever a script asks a trial for, rank 0 asks and tells the others: the value of a parameter,
whether to prune, an error. Works with any framework, since it is one broadcast of an object a question.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import ring_plugins.core.functions as ring
from ring_plugins.core.base.errors import ArgumentError, MismatchError

#: In the texts of objects that have none of their own; each process has others.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class SharedTrial:
    """A trial of which all ranks ask the same; has the methods and attributes of `optuna.trial.Trial`.

    Every call and every attribute is collective.

    Args:
        trial: Optuna's on rank 0, None on the others.
    """

    def __init__(self, trial: Any = None) -> None:
        self._trial = trial
        self._mismatch: MismatchError | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        import optuna

        if callable(getattr(optuna.trial.Trial, name, None)):
            return lambda *args, **options: self._ask(name, args, options)
        return self._ask(name, (), None)

    def _ask(self, name: str, args: Sequence[Any], options: dict[str, Any] | None) -> Any:
        own = name if options is None else f"{name}{(*args, *options.items())!r}"
        told: tuple[str, Any, Exception | None] | None = None
        if self._trial is not None:
            try:
                found = getattr(self._trial, name)
                told = own, found if options is None else found(*args, **options), None
            except Exception as error:
                told = own, None, error
        found = ring.broadcast_object(told)
        if not isinstance(found, tuple):
            raise self._ended_alone("0", str(ring.rank()), own)
        asked, answer, raised = found
        is_measured = name.startswith(("report", "set_"))  # may differ: rank 0's count
        if not is_measured and _ADDRESS.sub("", asked) != _ADDRESS.sub("", own):
            self._mismatch = MismatchError(
                f"rank 0 asked its trial for {asked}, and rank {ring.rank()} for {own}. All ranks have to ask a "
                "SharedTrial for the same, in the same order: let what decides what to ask for be equal on all ranks."
            )
            raise self._mismatch
        if raised is not None:
            raise raised
        return answer

    def _ended_alone(self, ended: str, goes_on: str, asked: str) -> MismatchError:
        self._mismatch = MismatchError(
            f"rank {ended} has ended a trial in which rank {goes_on} asks for {asked}. What ends a trial has to be "
            "raised on all ranks: decide by trial.should_prune(), or let ranks tell each other that one has failed."
        )
        return self._mismatch


def optimize(study: Any, objective: Callable[[SharedTrial], Any], **options: Any) -> None:
    """Optimize an objective that all ranks compute together; collective.

        study = optuna.create_study() if ring.rank() == 0 else None
        optimize(study, objective, n_trials=20)

    Args:
        study: Optuna's on rank 0, which alone writes to its storage; None on the others.
        objective: gets a `SharedTrial`. What it returns on rank 0 counts. `optuna.TrialPruned` and the exceptions of
            `catch` end the trial, and have to be raised on all ranks: decide by `trial.should_prune()`.
        options: those of `study.optimize`, equal on all ranks; `n_jobs` has to be 1.

    Raises:
        ArgumentError: rank 0 has no study, another rank has one, or `n_jobs` is not 1.
        MismatchError: ranks asked a trial for different things.
    """
    import optuna

    if (study is None) != (ring.rank() > 0):
        raise ArgumentError(
            f"optimize(study={'None' if study is None else '...'}) on rank {ring.rank()}: rank 0 has the study, and "
            "the others pass None."
        )
    if options.get("n_jobs", 1) != 1:
        raise ArgumentError(
            f"optimize(n_jobs={options['n_jobs']}): all ranks compute one trial at a time, so leave n_jobs out. Start "
            "a job for each worker, with one storage, to compute several at a time."
        )
    if study is not None:

        def tell_and_compute(trial: Any) -> Any:
            ring.broadcast_object(True)
            return objective(SharedTrial(trial))

        study.optimize(tell_and_compute, **options)
        ring.broadcast_object(False)
        return
    caught = options.get("catch", ())
    ends = (optuna.TrialPruned, *((caught,) if isinstance(caught, type) else caught))
    while told := ring.broadcast_object(None):
        trial = SharedTrial()
        if isinstance(told, tuple):  # no trial begins: rank 0 asks the one that this rank has ended
            raise trial._ended_alone(str(ring.rank()), "0", told[0])
        with contextlib.suppress(*ends):
            objective(trial)
        if trial._mismatch is not None:  # which rank 0 does not know of: it is no error to go on behind
            raise trial._mismatch
