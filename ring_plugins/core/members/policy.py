"""What the user chose for the loss of a rank: whether the job goes on, and whether that works where it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.mesh import MOST_RANKS
from ring_plugins.core.rendezvous import detect
from ring_plugins.core.rendezvous.launcher_shim import restart_under_ring_run, restart_under_supervisors
from ring_plugins.core.rendezvous.record import Loss
from ring_plugins.core.rendezvous.spawn import number_of_slots

_REMEDY = f"leave out on_failure, and unset {config.ON_FAILURE.name}"


class FailurePolicy(NamedTuple):
    """What a job does when a rank is lost.

    Attributes:
        recovers: whether the others go on.
        min_ranks: with how many of them at least.
        replaces: whether another process takes its place.
        max_ranks: to how many ranks the job may grow; 0 for no more than at the start.
    """

    recovers: bool
    min_ranks: int
    replaces: bool = False
    max_ranks: int = 0

    @property
    def on_failure(self) -> str:
        """As an argument of `init`."""
        return "replace" if self.replaces else "continue" if self.recovers else "end"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of ranks that are started one by one, each of which may outlive the others."""
        if not self.recovers:
            return {}
        chosen = {config.ON_FAILURE.name: self.on_failure, config.MIN_RANKS.name: str(self.min_ranks)}
        return {**chosen, config.LOSSES_TOLERATED.name: "1"}

    @classmethod
    def chosen(cls, on_failure: str | None, min_ranks: int | None, max_ranks: int | None = None) -> FailurePolicy:
        """The policy of `init`'s arguments; where they are None, of RING_ON_FAILURE, _MIN_RANKS and _MAX_RANKS.

        Raises:
            ArgumentError: an argument or a variable is invalid.
        """
        check_values(on_failure, min_ranks, max_ranks)
        least, most = config.MIN_RANKS.get(), config.MAX_RANKS.get()  # checked even where they have no effect
        if config.MIN_RANKS.is_set() and not least:
            raise ArgumentError(
                f"{config.MIN_RANKS.name}=0 is not a positive number of ranks: give 1 or more, or unset it."
            )
        chosen = on_failure or config.ON_FAILURE.get()
        recovers, replaces = chosen != "end", chosen == "replace"
        if min_ranks is not None and not recovers:
            raise ArgumentError(
                f'min_ranks={min_ranks} needs on_failure="continue" or "replace", with which a job goes on when ranks '
                "are lost; pass both, start with `ring run --on-failure continue`, or leave min_ranks out."
            )
        if max_ranks is not None and not replaces:
            raise ArgumentError(
                f'max_ranks={max_ranks} needs on_failure="replace", with which further processes can join a job; pass '
                "both, or leave max_ranks out."
            )
        if recovers:
            _check_variables_of_gpus(chosen)
        least = (min_ranks or least or 1) if recovers else 0
        return cls(recovers, least, replaces, (max_ranks or most) if replaces else 0)

    def idle_variables(self) -> list[str]:
        """Variables that are set, but have no effect with this policy, each with what it needs."""
        either, replace = f"{config.ON_FAILURE.name}=continue or replace", f"{config.ON_FAILURE.name}=replace"
        needs = {config.MIN_RANKS: (self.recovers, either), config.MAX_RANKS: (self.replaces, replace)}
        needs[config.STANDBYS] = self.replaces, replace
        return [
            f"{variable.name}={variable.get()} has no effect without {other}."
            for variable, (is_met, other) in needs.items()
            if not is_met and variable.is_set() and variable.get()
        ]

    def check_size(self, ranks: int) -> None:
        """Check that a job of so many ranks can begin.

        Raises:
            ArgumentError: it has fewer than `min_ranks`, or more than `max_ranks`, or could not grow.
        """
        if self.min_ranks > ranks:
            raise ArgumentError(
                f"min_ranks={self.min_ranks} is more than the {ranks} ranks of the job: lower min_ranks or "
                f"{config.MIN_RANKS.name}, or start more ranks."
            )
        if 0 < self.max_ranks < ranks:
            raise ArgumentError(
                f"max_ranks={self.max_ranks} is less than the {ranks} ranks of the job: raise max_ranks or "
                f"{config.MAX_RANKS.name}, or start fewer ranks."
            )
        if self.max_ranks > MOST_MEMBERS:
            raise ArgumentError(
                f"max_ranks={self.max_ranks} is more than {MOST_MEMBERS}, the most that can join a job."
            )
        if ranks == 1 < self.max_ranks:
            raise ArgumentError(
                f"max_ranks={self.max_ranks}: a job of one rank cannot grow. Start it with ranks=2 or more."
            )

    def check_nccl(self) -> None:
        """Check that communicators between GPUs can be given up when a rank is lost; jobs on CPUs make none.

        Raises:
            ArgumentError: NCCL is told to make them block.
        """
        if self.recovers and os.environ.get("NCCL_COMM_BLOCKING") == "1":
            raise ArgumentError(
                f'NCCL_COMM_BLOCKING=1 does not work with on_failure="{self.on_failure}": a rank that is inside NCCL '
                f"when another one dies would stay there. Unset it on all ranks, or {_REMEDY}."
            )


def _check_variables_of_gpus(on_failure: str) -> None:
    """Check that no variable asks for what holds a communicator between GPUs that a loss would end.

    Raises:
        ArgumentError: one does.
    """
    holds = {
        config.NCCL_REGISTER: "NCCL registers memory with one communicator, and forgets it with that",
        config.JAX_NCCL: "compiled steps of JAX call the communicator that they were compiled with",
        config.TENSORFLOW_NCCL: "steps of TensorFlow cannot be repeated from the gradients that they have overwritten",
    }
    for variable, reason in holds.items():
        if variable.get():
            raise ArgumentError(
                f'{variable.name}={variable.text()} does not work with on_failure="{on_failure}": {reason}, and the '
                f"first lost rank ends the communicator. Unset {variable.name} on all ranks, or {_REMEDY}."
            )


def check_values(on_failure: Any, min_ranks: Any, max_ranks: Any) -> None:
    """Check each of `init`'s arguments by itself.

    Raises:
        ArgumentError: one is invalid.
    """
    if on_failure not in (None, "end", "continue", "replace"):
        raise ArgumentError(f'on_failure={on_failure!r} must be "end", "continue" or "replace".')
    for name, number in (("min_ranks", min_ranks), ("max_ranks", max_ranks)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ArgumentError(f"{name}={number!r} is not a positive number of ranks.")


def prepare_to_continue(ranks: int | None, policy: FailurePolicy, generation: int) -> None:
    """Make sure that what started this process does not end it when another rank dies.

    A script that is to spawn its ranks does not return from this: it starts again, under `ring run`. Nor does one that
    mpirun, torchrun or srun has started: its ranks start again, under supervisors that take the place of its processes.
    Processes that were started one by one, with RANK and MASTER_ADDR in their environment, end nobody else.

    Args:
        ranks: that `init` is asked for.
        policy: of this process; goes on after losses.
        generation: how often this process has connected before.

    Raises:
        ArgumentError: what started this process would end it.
        LaunchError: this script cannot be started again.
    """
    record, was_told = detect(), config.LOSSES_TOLERATED.is_set()
    at_loss = record.launcher.at_loss
    if at_loss is Loss.ALONE and (ranks is None or ranks == 1):
        return
    if at_loss is Loss.ALONE and ranks is not None and not was_told:
        policy.check_size(ranks)
        # This process would be the parent of the other ranks, which could not outlive it.
        restart_under_ring_run(ranks, policy.min_ranks, policy.on_failure, policy.max_ranks)
    _check_the_first_start(policy, generation, was_told)
    if at_loss is Loss.AS_TOLD and was_told:
        _check_how_far_it_grows(policy, number_of_slots() or config.MAX_RANKS.get(), record.by)
        return
    if record.by.startswith("ring_plugins."):  # `ring_plugins.run` or a relative of it
        raise ArgumentError(
            f'init(on_failure="{policy.on_failure}") comes too late in a function that {record.by} calls, which ends '
            f"all ranks when one dies: pass on_failure there instead, {record.by}(..., on_failure="
            f'"{policy.on_failure}"), or {_REMEDY}.'
        )
    if at_loss not in (Loss.STARTS_ANEW, Loss.NOTHING):
        raise ArgumentError(
            f'on_failure="{policy.on_failure}" does not work under {record.by}, which may end all ranks when one dies: '
            f"start the job with mpirun, torchrun or srun, with `ring run --on-failure {policy.on_failure} -n 4 python "
            f"train.py`, or on one host with plain python and init(ranks=4); or {_REMEDY}."
        )
    if record.size == 1:
        return
    if record.size is not None:
        policy.check_size(record.size)
    if at_loss is Loss.STARTS_ANEW:
        restart_under_supervisors(record, policy.min_ranks, policy.on_failure, policy.max_ranks, _REMEDY)
    if policy.replaces:
        raise ArgumentError(
            'on_failure="replace" needs somebody who starts processes in the places of lost ranks: start the '
            f"job with `ring run`, mpirun, torchrun or srun, or {_REMEDY}."
        )


def _check_the_first_start(policy: FailurePolicy, generation: int, is_under_ring_run: bool) -> None:
    """Check that this is the first `init` of a job that was started with the same `on_failure`."""
    if generation:
        raise ArgumentError(f'init() cannot be called again after shutdown() with on_failure="{policy.on_failure}".')
    if policy.replaces and is_under_ring_run and config.ON_FAILURE.get() != policy.on_failure:
        raise ArgumentError(
            'init(on_failure="replace"): the job was started with on_failure="continue", so nobody would take the '
            f"place of a lost rank: start it with `ring run --on-failure replace`, or {_REMEDY}."
        )


def _check_how_far_it_grows(policy: FailurePolicy, most: int, by: str) -> None:
    """Check that `max_ranks` is no more than the launcher of the job was told."""
    if policy.max_ranks and policy.max_ranks != most:
        told = f"was told to have up to {most} ranks" if most else "was not told that the job may grow"
        raise ArgumentError(
            f"max_ranks={policy.max_ranks}, but {by} {told}: start the job with `ring run --max-ranks "
            f"{policy.max_ranks}`, or leave max_ranks out of init()."
        )


def check_policies(
    policies: Sequence[Sequence[Any]], shares_memory: bool, uses_sockets: bool, job: str, has_slots: bool = False
) -> None:
    """Check that all ranks have the same policy, and that the job can go on after losses.

    Args:
        policies: each rank's `FailurePolicy`.
        shares_memory: whether all of them share memory.
        uses_sockets: whether sockets connect those that do not.
        job: the ranks and hosts, for the error.
        has_slots: whether supervisors of all hosts can start processes in the places of lost ones.

    Raises:
        ArgumentError: on all ranks, if not.
    """
    size, min_ranks = len(policies), policies[0][1]
    if len(set(map(tuple, policies))) > 1:
        raise ArgumentError(
            f"on_failure, min_ranks or max_ranks differ by rank: {list(map(tuple, policies))}. Pass the same to init() "
            "on all ranks."
        )
    if not shares_memory and not uses_sockets:
        raise ArgumentError(
            f'on_failure="continue" works on several hosts if sockets connect them, but {job} are connected by MPI or '
            f"cannot share memory on their host: set {config.TRANSPORT.name}=tcp, or {_REMEDY}."
        )
    if not shares_memory and policies[0][2] and not has_slots:
        raise ArgumentError(
            'on_failure="replace" works on several hosts under `ring run -H`, mpirun, torchrun and srun, but these are '
            f'{job} without them: use on_failure="continue", or {_REMEDY}.'
        )
    if not shares_memory and policies[0][3] and not has_slots:
        raise ArgumentError(
            f"max_ranks={policies[0][3]}: jobs grow on one host, and on several under `ring run -H`, but these are "
            f"{job} without it: leave it out."
        )
    if size > (most := MOST_MEMBERS if shares_memory else MOST_RANKS):
        raise ArgumentError(f'on_failure="continue" works with up to {most} ranks, but these are {job}: {_REMEDY}.')
    if min_ranks > size > 1:
        FailurePolicy(*policies[0]).check_size(size)


class FirstCall:
    """The arguments of the first `init`; later calls must agree with them.

    Args:
        policy: chosen then.
        size: of the job.
        asked: the number of ranks that was asked for, if any.
    """

    def __init__(self, policy: FailurePolicy, size: int, asked: int | None) -> None:
        self._policy, self._size, self._asked = policy, size, asked
        self._variables = {variable: variable.text() for variable in config.READ_BY_INIT}

    def check(
        self,
        caller: str,
        ranks: int | None = None,
        on_failure: str | None = None,
        min_ranks: int | None = None,
        max_ranks: int | None = None,
    ) -> None:
        """Check the arguments of a later call; None means that it does not care.

        Args:
            caller: "init" or what calls it, for the error's text.
            ranks, on_failure, min_ranks, max_ranks: as for `init`.

        Raises:
            ArgumentError: they differ from the first call's, or one is invalid.
        """
        check_values(on_failure, min_ranks, max_ranks)
        policy, size = self._policy, self._size
        most = (policy.max_ranks or size) if policy.replaces else None
        now = {"on_failure": policy.on_failure, "min_ranks": policy.min_ranks or None, "max_ranks": most, "ranks": size}
        wanted = {"on_failure": on_failure, "min_ranks": min_ranks, "max_ranks": max_ranks, "ranks": ranks}
        others = {name: value for name, value in wanted.items() if value not in (None, now[name])}
        if ranks == self._asked:
            others.pop("ranks", None)
        told = [f"{caller}({', '.join(f'{name}={value!r}' for name, value in others.items())})"] if others else []
        before = [f"{name}={now[name]!r}" if now[name] else f"no {name}" for name in others]
        for variable, text in self._variables.items():
            if variable.text() != text:
                told.append(f"{variable.name}={variable.text()!r}")
                before.append(f"{variable.name}={text!r}" if text else f"no {variable.name}")
        if told:
            raise ArgumentError(
                f"{' and '.join(told)}: init() was called before with {' and '.join(before)}, and a job does "
                "not change by another call. Pass all of it to the first call, which comes before anything else that "
                "uses the job, on all ranks; later calls may leave it out."
            )
