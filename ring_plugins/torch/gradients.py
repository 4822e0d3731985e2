"""Gradients of a torch model, averaged while backward is still running.

The path of one gradient: autograd accumulates it and calls `GradientAverager`'s hook (`hooks`); the hook marks it
ready with the core's `GradientReducer`; when the last gradient of a bucket is ready the reducer has `GradientBuckets`
fill the bucket and launches one all-reduce. The end of backward launches what is left and waits, so `p.grad` holds
averages as soon as `backward()` returns. What ranks compare travels with them (`consistency`).

The file is longer than others, and its class has more methods: they are the public ones, and the way of a pass, from
the first hook to its end or failure, which is read together.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from ring_plugins.core.arrays.codec import CodecName, Compression
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError, StepSkipped
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketSizes
from ring_plugins.core.gradients.trials import BucketTuner, chosen_overlap, tuning_is_wanted
from ring_plugins.core.groups import Group as RankGroup
from ring_plugins.core.groups import communicator_of
from ring_plugins.core.world import (
    constructed_by_all,
    current,
    has_not_joined,
    is_initialized,
)
from ring_plugins.observe.consistency import listed
from ring_plugins.observe.same_samples import tell_if_same
from ring_plugins.torch import changes
from ring_plugins.torch.bucket_sets import (
    BucketSets,
    communicator_for,
    compression_between,
    named_parameters,
    requires_grad,
    streams_of,
)
from ring_plugins.torch.changes import Claim, DroppedAverager, rejection, still_there
from ring_plugins.torch.compared_options import Groups
from ring_plugins.torch.consistency import RecoveryCheck, TorchChecks
from ring_plugins.torch.device import is_capturing, memory_of, streams
from ring_plugins.torch.gradient_buckets import GradientBuckets, Named
from ring_plugins.torch.hooks import Group, Hooks, OwnGradients, current_task, no_callback
from ring_plugins.torch.skipped_steps import Failure, SkippableStep, SkippedSteps
from ring_plugins.torch.tensor_memory import are_pairs

#: What other ranks are told that an exception has ended.
_CONSTRUCTING = "the construction of a gradient averager"
#: Places of averagers in the order in which they are finished: all ranks construct them in the same order.
_order = itertools.count()


class GradientAverager:
    """Averages the gradients of a model's parameters among all ranks.

    When `backward()` returns, `p.grad` of every parameter is the average over all ranks: clipping,
    unscaling, accumulation and any optimizer work as with one process. A gradient that no rank has stays
    None; one that some ranks have counts as zeros on the others.

    Frozen parameters take no part. Every backward first looks at the parameters again, so freezing,
    unfreezing and adding parameters work, if all ranks do it in the same step.

    Keep a reference: an averager that nothing refers to stops averaging, and to train on without it is an error, unless
    it was closed. A parameter has one averager. A newer one takes over from one that was closed or is no longer
    referred to; to use both is an error.

    Args:
        parameters: a module, or (name, parameter) pairs, equal on all ranks and in the same order.
        bucket_bytes: size at which a bucket is closed, 25 MiB by default.
        first_bucket_bytes: the same for the first one, 1 MiB by default, so that communication starts early.
        sparse: "gather" keeps sparse gradients sparse, "densify" makes them dense.
        passes_per_step: number of backward passes per step, of which only the last communicates; the others accumulate.
            Where a step of a torch optimizer has fewer, it averages first, and where it has more, each of the further
            passes communicates.
        autotune: whether to try other bucket sizes in the first steps and keep the fastest; as RING_AUTOTUNE says by
            default. Rank 0's choice counts. A process with several averagers in host memory tries none.
        compression: "fp16" or "bf16" sends float32 and float64 gradients in 16 bits: between hosts on the CPU (exact
            inside a host), and between all GPUs. "int8" sends them in 8 between hosts; those of GPUs go through memory
            of the host then. "auto" tries none, "bf16" and "int8" in about the first 100 steps on the CPU, and keeps
            what makes steps shortest.
        error_feedback: whether the rounding error of a step is added to the next; None: with "int8" only. "auto" does
            not try "int8" with False.
        overlap: True averages while backward still runs, False when it is over, in the thread that called it. "auto"
            does as RING_OVERLAP says, and by default tries both in the first steps and keeps the faster. Rank 0's
            choice counts. On GPUs it is always True, unless their gradients go through memory of the host.
        communicator: reduces the gradients; by default a new one over all ranks, for the parameters' device.
            Nothing else may use it. If one is given, gradients go through it even if it has only one rank, which
            shows what averaging costs without a peer; otherwise a single rank gets no hooks.
        group: whose ranks average, by default all. Its members alone construct it. Averagers of different groups own
            different parameters, as where experts are sharded over groups and dense layers are not (docs/groups.md).

    All ranks construct it together, or all of the group. Its gradients must not be computed by several threads at once.
    If several models have an averager each, their backward passes may run at the same time.

    Raises:
        MismatchError: the models differ among ranks; the text names the first parameter that does.
        ArgumentError: `sparse`, `passes_per_step` or `compression` is invalid, the parameters are on several devices,
            or this rank is not in the group.
        RingError: at its first use, another averager that is in use has some of the parameters. Also, on all ranks, at
            the next use after a backward that raised on some of them and was caught; see `skip_step_on`.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Named],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        passes_per_step: int = 1,
        autotune: bool | None = None,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        overlap: bool | Literal["auto"] = "auto",
        communicator: Communicator[Any] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        with constructed_by_all(_CONSTRUCTING, communicator or (communicator_of(group) if group is not None else None)):
            if sparse not in ("gather", "densify"):
                raise ArgumentError(f'sparse={sparse!r} must be "gather" or "densify".')
            _check_passes(passes_per_step)
            model = parameters if isinstance(parameters, nn.Module) else list(parameters)
            if isinstance(model, list) and not are_pairs(model, nn.Parameter):
                raise ArgumentError(
                    "parameters holds other items than (name, parameter) pairs, as parameters() does: pass the model, "
                    "or its named_parameters()."
                )
            sizes = BucketSizes(bucket_bytes, first_bucket_bytes).checked()
            chosen_overlap(overlap)
            wanted, own = Compression.named(compression, error_feedback), streams_of(named_parameters(model))
            #: What reduces the gradients.
            self.communicator: Communicator[Any] = communicator or communicator_for(
                named_parameters(model), group=group, compression=wanted
            )
            #: Of the job, of whose end passes tell; none where threads of one process are the ranks.
            self._elastic: Any = (
                current().elastic if is_initialized() else SimpleNamespace(wants_change=False, passes=0, widest=0)
            )
            self._elastic.widest = max(self._elastic.widest, self.communicator.size)
            with on_all_or_none(self.communicator, _CONSTRUCTING):  # in which the others wait by now
                if self.communicator.recovers and tuning_is_wanted(autotune):
                    current().refuse_to_recover("autotuning of bucket sizes (autotune=True, RING_AUTOTUNE=1)")
                recovers = self.communicator.recovers
                self._recovery: RecoveryCheck | None = RecoveryCheck(self.communicator) if recovers else None
                codec = compression_between(self.communicator, wanted, own)
        #: Of a GPU whose gradients NCCL reduces.
        self._streams = streams(self.communicator.device) if isinstance(self.communicator, DeviceCommunicator) else None
        self._buckets: GradientBuckets | None = None  # of the current pass; None if there is only one rank
        self._tuner: BucketTuner | None = None
        # The last is the number of the last change when a look has found nothing unusual.
        self._passes_per_step, self._passes, self._seen = passes_per_step, 0, -1
        self._accumulates, self._synchronizes, self._has_told_of_graphs = False, True, False
        #: What it knows of gradients that are not averaged.
        self.own = OwnGradients(self)
        self._hooks = Hooks(self, next(_order), own)
        self._sets = BucketSets(
            *(model, self.communicator, self._hooks, self._streams, sizes, codec),
            gathers_sparse=sparse == "gather",
        )
        #: To the parameters that it trains.
        self.claim = self._sets.claim
        #: What ranks compare.
        self.checks: TorchChecks = self._sets.checks
        # Not the sets: they refer to the model, which may refer to this object.
        self._finalizer = weakref.finalize(self, _discard, self._hooks, self.communicator, self.claim)
        self._finalizer.atexit = False  # type: ignore[misc, unused-ignore]
        #: The steps that all ranks skip.
        self.skipping = SkippedSteps(self.communicator)
        #: Whether it averaged, and was closed; and whether it averages in host memory.
        self.is_closed, self.is_on_host = False, self._streams is None
        #: Reductions of all gradients so far; whether these leave sums, which Horovod's users may ask for; and the
        #: compression that was asked for.
        self.steps, self.sums, self.compression = 0, False, compression
        #: Whether ranks may run out of data (`join`), the share of the ranks that had in the last pass, the group, and
        #: whether ranks that begin with equal gradients are warned of: frameworks that see the samples compare these.
        self.is_joined, self.ended, self.group, self.tells_same_samples = False, 0.0, group, True
        if self.communicator.size > 1 or communicator is not None or self._recovery is not None:
            try:
                with on_all_or_none(self.communicator, _CONSTRUCTING):
                    if self._streams is None:  # a GPU's streams always overlap
                        self._sets.choose_ways(overlap)
                    self._sets.take_parameters()
                    self._buckets = self._sets.current(self.steps)
                self.own.watch()
            except BaseException:
                self.close()  # the error's traceback refers to this object
                raise
            if self.communicator.broadcast_object(tuning_is_wanted(autotune), purpose="GradientAverager"):
                self._tuner = BucketTuner(sizes, self._buckets.plan.buckets_with, self.communicator)
        elif group is not None:  # a group of one, whose parameters other ranks need not have
            self._sets.claim_alone()

    # Figures ----------------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped."""
        return self.skipping.count

    @property
    def waited_seconds(self) -> float:
        """Seconds that the script has waited for communication after its backwards."""
        return self._sets.waited_seconds

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._sets.reduced_bytes

    @property
    def named_parameters(self) -> Sequence[Named]:
        """(name, parameter) pairs in the order in which ranks average them; a shared parameter once."""
        if self._buckets is None and not self.is_closed:  # a single rank, which averages nothing
            return [(name, parameter) for parameter, name in {p: name for name, p in self._sets.all_named()}.items()]
        return self._sets.named

    def set_parameters(self, parameters: Sequence[Named]) -> None:
        """Replace the list given at construction."""
        self._sets.model = list(parameters)
        if self._buckets is not None:
            self._sets.take_parameters()

    @property
    def passes_per_step(self) -> int:
        """Backward passes of a step, of which the last one communicates."""
        return self._passes_per_step

    def set_passes_per_step(self, passes: int) -> None:
        """Replace `passes_per_step`, on all ranks between the same two steps. Passes since the last step do not count.

        Raises:
            ArgumentError: `passes` is not a positive number.
        """
        _check_passes(passes)
        self._passes_per_step, self._passes = passes, 0

    def compare_options(self, groups: Groups, names: Mapping[nn.Parameter, str] | None = None) -> None:
        """From now on, raise `MismatchError` at the end of backward on all ranks if they make different updates.

        So they do if their learning rates differ, or the numbers of their updates. `DistributedOptimizer` and the
        Lightning strategy call this. On GPUs, the error comes a step later. Collective.

        Args:
            groups: returns the parameter groups of the optimizers that use the averages.
            names: of all parameters that the script has named, by which an error may say what is not averaged.

        Raises:
            MismatchError: other options of the optimizers differ.
        """
        self.checks.follow(groups, names or {}, None if self._buckets is None else self.communicator)
        self.own.counts_updates = False

    def prepare(self) -> bool:
        """Check whether parameters were frozen, unfrozen or added, and make new buckets if so (collective then).

        The forward of a module given at construction and the first gradient of a backward call this, so scripts
        seldom need to.

        Returns:
            Whether the buckets changed.

        Raises:
            RingError: another averager that is in use has some of the parameters.
        """
        if self._is_ordinary():
            return False
        if (newer := self.claim.newer()) and (newer := still_there(newer)):
            raise rejection([newer[0].conflict([self.claim])], [self.communicator.ranks[self.communicator.rank]])
        return self._prepare()

    def catch_up(self, passes: int | None = None) -> int:
        """How many passes of a step have come; if given, those of a rank that has come further than this one."""
        if passes is not None:
            self._passes = passes
        return self._passes

    def wants_change(self) -> bool:
        """Whether this rank is to leave, or sees that others wait to join; asked before averages are taken."""
        return bool(self._elastic.wants_change if self._recovery is None else self._recovery.begin_pass())

    def note_averages(self) -> None:
        """Note that gradients are averages of all ranks, made without a pass; collective if ranks have changed."""
        self.forget_gradients()
        self.steps += 1
        if self._recovery is not None:
            self._recovery.after_pass(self._sets.named)

    def begin_step(self) -> None:
        """Forget the passes of a step that the script gave up, as `DistributedOptimizer.zero_grad` does.

        An exception in a forward may end a step after some of its `passes_per_step`. They must not count for the next
        one, whose last passes would otherwise add this rank's own gradients to the averages.
        """
        if self._hooks.callback is no_callback or not self._hooks.is_running:
            self._passes = 0

    def forget_gradients(self) -> None:
        """As `begin_step`, where there are no gradients any more."""
        if self.own.present:
            self.own.clear()
            self._sets.let_go()
        self.begin_step()

    def _is_ordinary(self) -> bool:
        """Whether there is no need to look: all is as when a look found nothing unusual, or nothing is averaged."""
        return self._buckets is None or (
            self._seen == changes.last
            and self._hooks.callback is no_callback
            and not self._buckets.reducer.is_under_way
            and self._sets.seen == tuple(map(requires_grad, self._sets.parameters))
        )

    def _prepare(self) -> bool:
        """The look: at all that an ordinary step does not do (see `changes`)."""
        last = changes.last
        self._check_usable()
        self.abandon()
        buckets = self._sets.current(self.steps)
        changed, self._buckets = buckets is not self._buckets, buckets
        self.claim.settle(self.communicator)
        # A GPU tells of other ranks only when it is asked.
        is_ordinary = self._streams is None and self.skipping.is_ordinary and self._sets.is_ordinary
        self._seen = last if is_ordinary and not self.claim.newer() else -1
        return changed

    # A backward -------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Look what has changed; the module's hook calls this."""
        if (
            torch.is_grad_enabled()
            and self._synchronizes
            and not self._is_ordinary()
            and not self._hooks.is_running
            and not self.claim.newer()
        ):
            self._prepare()

    def _begin(self) -> bool:
        """Handle the first gradient of a backward: see what changed, and ask autograd to call at the end.

        Returns:
            Whether this averager takes part; not if a newer one has its parameters.
        """
        if self._buckets is None:
            return False
        if not self._is_ordinary():
            if self.claim.newer():
                return False
            self._prepare()
        self.own.present = True
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        if self._accumulates:
            self._sets.hold_trained()
        elif torch.is_grad_enabled() and self.communicator.rank == 0 and not self._has_told_of_graphs:
            self._has_told_of_graphs = True
            logger.warning(
                f"{self.communicator.name}: backward(create_graph=True) was called, and averages have no graph, so a "
                "second derivative computed from p.grad is zero, or an error of torch. Take the first derivative by "
                "torch.autograd.grad(loss, parameters, create_graph=True), and call backward() once, on the sum."
            )
        # A backward inside another may add to a gradient again, so all are sent at the end, unless the last had none.
        reducer = self._buckets.reducer
        reducer.holds = self._hooks.is_nested
        if not self._accumulates:
            reducer.begin()
        self._hooks.begin(self._buckets.bucket_of, counts=not self._accumulates and reducer.overlaps)
        return True

    def gradient_came(self, group: Group, parameter: torch.Tensor) -> None:
        """Handle the first gradient of a backward, the last one of a group, and any that came after it; for hooks."""
        if not self._synchronizes:
            if self.own.come_in(current_task()):
                self._sets.hold_trained()
            return
        if self._hooks.callback() is None:  # autograd holds none: this is the first
            if not self._begin():
                return
            if self._hooks.arrivals is not None:
                self._hooks.arrivals[:] = [id(parameter)]
            if group not in self._hooks.groups:  # the first gradient found that the model had changed
                position = next(i for i, p in enumerate(self._sets.parameters) if p is parameter)
                group = next(group for group in self._hooks.groups if position in group.positions)
            group.left -= 1
            if group.left > 0:
                return
        buckets = self._buckets
        if self._accumulates or buckets is None or group.bucket < 0:
            return
        if group.left < 0:
            if buckets.reducer.has_left(group.bucket):
                name = next((name for name, p in self._sets.named if p is parameter), "a parameter")
                raise RingError(
                    f"the gradient of {name} was computed twice in one backward, after it had been sent. "
                    "Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in no_sync()."
                )
            return
        if current_task() != self._hooks.task:
            # Some of these gradients came from another backward, inside or around this one. They may come again.
            self._hooks.is_nested = buckets.reducer.holds = True
        buckets.reducer.mark_some_ready(group.bucket, len(group.positions), buckets.fill)

    def launch_rest(self) -> None:
        """Launch what is left at the end of a backward, without waiting; for hooks."""
        if self._buckets is not None and not self._accumulates:
            self._buckets.launch_rest()

    def end_backward(self) -> None:
        """Handle the end of a backward; for hooks."""
        if self._accumulates:
            self._hooks.end()
            self.own.note()
        elif self._buckets is not None:
            if self._seen != changes.last:
                self._check_usable()
            self._end_pass(None)

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for everything.

        The end of backward does. A script calls it only on a rank that ran no backward at all in a step in which others
        did: the rank then takes part with zeros.
        """
        if self._buckets is None:
            return
        self._check_usable()
        if not self._hooks.is_running:
            self.prepare()
        self._end_pass(None)

    def average_before_step(self) -> None:
        """Reduce once more, since an optimizer is about to use gradients that no backward has averaged.

        Raises:
            RingError: this is inside a backward, or the script has written to gradients of this rank.
        """
        if self._buckets is None:
            return
        if current_task() != -1:
            raise RingError(
                f"{self.communicator.name}: an optimizer's step() was called inside a backward, by a hook of a "
                "parameter, before that backward's gradients were averaged, so each rank would train a model of its "
                "own. Call step() and zero_grad() when backward() has returned. shard=True saves the memory of "
                "optimizer states instead."
            )
        if self.own.present and self.own.were_changed:
            raise RingError(
                f"{self.communicator.name}: gradients of this rank were changed in place (clipped, say) before they "
                "were averaged, since no backward after the last step() has averaged them: they came in no_sync(), or "
                "in fewer passes than passes_per_step. Call optimizer.synchronize(), or GradientAverager.finish(), "
                "after the last backward of such a step. If each rank is to change its own gradients, assign new ones: "
                "p.grad = p.grad * x."
            )
        self.finish()

    def _end_pass(self, failure: Failure | None) -> None:
        """End a pass on all ranks.

        Args:
            failure: of a rank that could not compute its gradients.
        """
        buckets = self._buckets
        assert buckets is not None
        self._hooks.end()
        self._accumulates = False
        if failure is not None or not self.own.sees_steps:
            self._passes = 0  # else the step begins anew; passes before that are averaged, too
        self.own.clear()
        if self._sets.holds:
            self._sets.let_go()
        self._hooks.has_averaged = True
        try:
            members_change = self._complete(buckets, failure)
        except BaseException as error:
            if not isinstance(error, RingError) and not self._has_failed():
                # The others have the averages by now and step, so this pass cannot be made up for.
                self.communicator.interrupt("the end of a backward", error)
            raise
        if members_change:
            current().elastic.change_members()
            current().elastic.tell_changes()

    def _complete(self, buckets: GradientBuckets, failure: Failure | None) -> bool:
        """Get the averages of a pass, and whatever else the ranks agree on at its end.

        Returns:
            Whether the membership changes now: a rank leaves, or a process joins.
        """
        # What a group has averaged tells nothing if others are averaged among more ranks, which would not know yet.
        is_wide = self.communicator.size >= self._elastic.widest
        tells_all = self._recovery.tells_all if self._recovery is not None else is_wide
        wants_change = self._elastic.wants_change if self._recovery is None else self._recovery.begin_pass()
        buckets.wants_change = tells_all and wants_change
        at_once = self.skipping.step is not None or not buckets.is_ordered or self.checks.is_due or self.is_joined
        at_once |= self._recovery is not None  # the host has waited for the GPU
        try:
            outcome = buckets.finish(at_once) if failure is None else buckets.fail()
        except MismatchError as error:
            self._sets.explain(error, buckets.is_trained)
            raise
        if outcome.failed:
            self._passes = 0
            self.skipping.decide(outcome.failed, failure, self._sets.parameters)
            return False
        self.ended = outcome.ended
        if self._recovery is not None and not outcome.ended:  # ranks that have run out of data do not update
            self._recovery.after_pass(self._sets.named)
        if outcome.found_sparse:
            self._sets.sparse.update(outcome.found_sparse)
            self._sets.drop_all()
        self.steps += 1
        # Else it is not known yet what was told.
        self._elastic.passes += tells_all and (at_once or self._streams is None)
        if self.sums:
            parameters = [parameter for _, parameter in self._sets.named]
            _multiply(itertools.compress(parameters, buckets.is_trained), self.communicator)
        if outcome.options_differ:
            self.checks.say(self.communicator)
        if buckets.replaced and (names := self._sets.replaced_by_untrained(buckets)):
            raise RingError(
                f"{self.communicator.name}: {listed(names)} of the model had been replaced by another parameter, as by "
                "an assignment of a parameter or layer, or by load_state_dict(assign=True), and the optimizer has the "
                "old one, so the new one is neither averaged nor trained. Make the optimizer and DistributedOptimizer "
                "after that, give it the new one (add_param_group), freeze the new one, or copy values instead: "
                "p.data.copy_(x)."
            )
        captures = self._streams is not None and is_capturing()
        if self._hooks.arrivals is not None and not captures:
            if outcome.has_others:
                # Ranks may wait for their averagers in different orders, so none may wait for more than its gradients.
                buckets.is_ordered = True
            else:
                self._sets.learn_order(buckets)
                if self.tells_same_samples:
                    tell_if_same(buckets.first or 0, self.communicator)
            buckets.first = None
        if self._tuner is not None:
            self._tune(self._tuner, outcome.has_others)
        # Ranks that wait in `join` are not where the others are, but hear all the same that the job is to end.
        return outcome.members_change and (self._recovery is None or not outcome.ended)

    # A backward that raised ---------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self.skipping.check()
        if self._buckets is not None and self._buckets.check_late():
            self.skipping.give_up("on another rank")

    def _has_failed(self) -> bool:
        """Whether a pass began and neither ended nor goes on."""
        if self._buckets is None or self._hooks.is_running:
            return False
        return self._hooks.has_raised or self._buckets.reducer.is_under_way

    def abandon(self) -> None:
        """Get the ranks back in step after a backward that raised here; do nothing after one that did not.

        Other ranks may wait for the gradients. They learn that they will not come.

        Raises:
            RingError: on all ranks, unless it raised on all of them.
        """
        if self._has_failed():
            self._end_pass(Failure("a backward raised, and the script caught it", wants_to_skip=False))

    @contextlib.contextmanager
    def skip_step_on(self, *exceptions: type[BaseException]) -> Iterator[SkippableStep]:
        """Let all ranks skip a step in which some rank raises one of these exceptions, such as running out of memory.

            for batch in loader:
                with optimizer.skip_step_on(torch.cuda.OutOfMemoryError) as step:
                    optimizer.zero_grad()
                    loss(model, batch).backward()
                    optimizer.step()
                if step.skipped:
                    print(step.reason)

        The block holds one whole step, with all its passes if gradients accumulate, and what depends on it, such as
        clipping, `GradScaler.step` and `update`, and the scheduler. A rank that raises in it, before its gradients are
        averaged, tells the others at once. They leave the block when their backward ends. All ranks go on after it,
        with gradients of None. An exception that comes later, or is not among `exceptions`, is raised.

        The rank that raised takes part in the step's communication, for which it needs as much memory as its largest
        gradient. On GPUs, all ranks wait for each step's communication.

        Args:
            exceptions: what to skip; the errors of ring_plugins are never skipped.

        Raises:
            ArgumentError: `exceptions` are not exceptions, or the block is inside another, or inside `no_sync()`.
            RingError: the block ended without averaging anything, so it was not a whole step.
        """
        self.skipping.check_block(exceptions, self._synchronizes)
        self._check_usable()
        step, steps_before = SkippableStep(), self.steps
        self.skipping.step, self._seen = step, -1
        try:
            yield step
            if self._buckets is not None and self.steps == steps_before and not step.skipped:
                raise RingError(
                    "a skip_step_on() block ended without averaging gradients; let it hold one whole step, with all "
                    "passes if gradients accumulate."
                )
        except StepSkipped:
            if not step.skipped:
                raise  # another averager's
        except RingError:
            raise
        except exceptions as error:
            if self.steps > steps_before and not self._has_failed():
                raise
            self._skip(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        finally:
            self.skipping.step = None

    def _skip(self, reason: str) -> None:
        """Skip the step on all ranks, because this one cannot compute its gradients."""
        if self._buckets is None:
            self.skipping.skip_alone(reason, [parameter for _, parameter in self._sets.all_named()])
            return
        with contextlib.suppress(StepSkipped):
            if not self._has_failed():
                self._prepare()
            self._end_pass(Failure(reason, wants_to_skip=True))

    def average_loss(self, loss: Any) -> Any:
        """The average of all ranks' losses, with the same bits on all of them; collective.

        Args:
            loss: a number or a tensor with one element, or None on all ranks.

        Raises:
            ArgumentError: the loss has several elements.
            MismatchError: it is None on some ranks only.
        """
        if self._buckets is None:
            return loss
        is_tensor = isinstance(loss, torch.Tensor)
        if is_tensor and loss.numel() != 1:
            error = ArgumentError(
                f"the closure returned a loss of shape {tuple(loss.shape)}; return one number, such as loss.mean()."
            )
            self.communicator.reject("averaging a loss", error)
            raise error
        on_gpu = self._streams is not None and self._sets.parameters
        device = self._sets.parameters[0].device if on_gpu else torch.device("cpu")
        values = torch.zeros(2, dtype=torch.float64, device=device)
        if loss is not None:
            values[0], values[1] = loss.detach().reshape(()) if is_tensor else float(loss), 1
        self.communicator.all_reduce(memory_of(values), Op.AVERAGE)
        average, share_of_ranks = values.tolist()
        if 0 < share_of_ranks < 1 - 0.5 / self.communicator.size:
            raise MismatchError(
                f"the closure returned {'no' if loss is None else 'a'} loss on rank {self.communicator.rank}, unlike "
                "on other ranks; return the loss on all ranks."
            )
        if loss is None:
            return None
        return loss.detach().new_full(loss.shape, average) if is_tensor else average

    def _tune(self, tuner: BucketTuner, has_others: bool) -> None:
        """Choose the bucket sizes of the next step while other sizes are being tried.

        Not with several averagers: it needs waits of all ranks, which may use theirs in different orders.
        """
        if has_others:
            self._tuner = None
            if self.communicator.rank == 0:
                logger.warning(
                    f"{self.communicator.name}: bucket sizes are not tuned, since this process has several averagers."
                )
            return
        if not (self._sets.compression.finished and self._sets.overlap.finished):
            return
        tuner.step_ended(time.perf_counter())
        self._sets.resize(tuner.sizes)
        if tuner.finished:
            self._tuner = None
            if self.communicator.rank == 0:
                logger.info(f"tuned after {self.steps} steps: {tuner.summary}.")

    # Control ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only accumulate this rank's gradients; the next backward outside averages the sum."""
        before, self._synchronizes = self._synchronizes, False
        if self._buckets is not None and self._hooks.is_running:
            self._buckets.reducer.holds = True  # a backward inside another counts gradients that come again
        try:
            yield
        finally:
            self._synchronizes = before

    def check(self) -> None:
        """Raise if the failure of a rank made the last averages meaningless, which a GPU does not report.

        Call it before weights are saved; optimizer and strategy do when they are asked for their state.
        """
        if isinstance(self.communicator, DeviceCommunicator):
            self.communicator.check()

    def close(self) -> None:
        """Remove the hooks; gradients stay as they are. The object cannot be used afterwards.

        If a backward raised here, and the script caught that, the ranks that wait for its gradients raise now. Not
        while an exception is being handled, as in Lightning's teardown: that one probably ends the job, and says more.
        """
        if (self._has_failed() or self._hooks.is_running) and sys.exc_info()[1] is None:
            cause = RingError("its averager was closed before the gradients were averaged")
            self.communicator.interrupt("a backward", cause)
        self._finalizer.detach()
        self._hooks.remove()
        self.claim.drop()
        self._sets.drop_all()
        self.is_closed = self.is_closed or self._buckets is not None
        self._buckets = None
        self.communicator.close()


@torch.no_grad()
def _multiply(parameters: Iterable[torch.Tensor], communicator: Communicator[Any]) -> None:
    """Make sums of averages."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(communicator.size)


def _check_passes(passes: Any) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"passes_per_step={passes!r} is not a positive number.")


def _discard(hooks: Hooks, communicator: Communicator[Any], claim: Claim) -> None:
    """Release what an averager had that nobody refers to any more; called at any moment, in any thread."""
    if hooks.groups and not hooks.has_averaged and not has_not_joined():
        logger.warning(
            f"{communicator.name}: the averager was dropped before it averaged anything; keep a reference to it, or "
            "use what DistributedOptimizer returns."
        )
    if hooks.groups and is_initialized() and not claim.is_superseded:
        hooks.leave_behind(DroppedAverager(communicator.name, current()))
    else:
        hooks.remove()
    claim.drop()
    communicator.discard()
