"""The buckets of a model: one set for each set of parameters that are trained at one time.

Parameters may be frozen, unfrozen and added between two steps, and the parts of a model may take turns, so the buckets
of the last few sets are kept.

**Order.** A plan made from the model alone assumes that backward goes through its parameters from the last to the
first. Models that list their layers in another order than they use them, as many with several branches do, break that:
a bucket then waits for one early layer, and all buckets behind it wait, too. DistributedDataParallel rebuilds its
buckets once, in the order that the first backward had, and so do we. Ranks may see different orders, for example where
each takes another branch. Rank 0's counts for all, so plans stay equal. A gradient that rank 0 did not see comes last:
nothing else should wait for it.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ring_plugins.core.arrays.codec import AUTO, Compression
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.core.gradients.trials import (
    ALWAYS,
    UNCHANGED,
    Choice,
    Wanted,
    choose_compression,
    choose_overlap,
    chosen_overlap,
)
from ring_plugins.core.groups import Group
from ring_plugins.core.world import check_tried, current, has_room_to_overlap, node_rank, replaces
from ring_plugins.observe.consistency import listed
from ring_plugins.torch import changes
from ring_plugins.torch.changes import Claim, is_claimed
from ring_plugins.torch.consistency import TorchChecks
from ring_plugins.torch.device import TorchStreams, index_of, is_capturing, is_on_gpu, is_supported, streams
from ring_plugins.torch.gradient_buckets import GradientBuckets, Named
from ring_plugins.torch.hooks import Hooks
from ring_plugins.torch.sparse import sparse_parameters

#: How many sets are kept: adversarial training freezes one of two parts, in turn, twice a step.
_KEPT = 4
#: Which parameters are trained: by position, whether it is not frozen.
_Trained = tuple[bool, ...]
#: By purpose, how many communicators the job has had.
_made = dict[str, int]()
#: Reads `requires_grad`, without a call in Python.
requires_grad = operator.attrgetter("requires_grad")


def named_parameters(model: nn.Module | Sequence[Named]) -> Iterable[Named]:
    """The (name, parameter) pairs of a module, or those that were listed."""
    return model.named_parameters() if isinstance(model, nn.Module) else model


def communicator_for(
    named: Iterable[tuple[str, torch.Tensor]],
    purpose: str = "gradients",
    group: Group | None = None,
    compression: Compression | None = None,
) -> Communicator[Any]:
    """A new communicator, with a name of its own, for the device that the parameters are on; collective.

    Where NCCL cannot round as `compression` says, and there are several hosts, it is one for memory of the host.

    Args:
        named: (name, parameter) pairs.
        purpose: begins its name.
        group: whose ranks it connects, by default all.
        compression: of what it reduces.

    Raises:
        ArgumentError: they are on several devices, or on one that is neither CPU nor CUDA.
        MismatchError: they are on the CPU on some ranks and on GPUs on others.
    """
    devices: dict[torch.device, tuple[str, torch.Tensor]] = {}
    for name, parameter in named:
        if not is_supported(parameter):
            raise ArgumentError(
                f"{name} is on {parameter.device}; ring_plugins works in the memory of CPUs and of CUDA GPUs."
            )
        devices.setdefault(parameter.device, (name, parameter))
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, (name, _) in devices.items())
        raise ArgumentError(
            f"tensors lie on several devices: {places}. Each rank uses one; move the model there first."
        )
    _, example = next(iter(devices.values()), ("", torch.empty(0, device="cpu")))
    members = current() if group is None else group
    if (current().topology.size if group is None else group.size) == 1:
        return members.new_communicator(purpose)
    is_rounded = is_on_gpu(example) and compression is not None and compression.needs_host
    kind = f"{example.device.type}, {compression}" if is_rounded else example.device.type
    told = members.communicator.all_gather_object(
        (kind, _made.get(purpose, 0), node_rank()), f"new communicator for {purpose}"
    )
    kinds, made, nodes = zip(*told, strict=True)
    _made[purpose] = number = max(made) + 1
    name = purpose if number == 1 else f"{purpose} {number}"
    if len(set(kinds)) > 1:
        raise MismatchError(
            f"{name}: the tensors of the ranks lie on {list(kinds)}, in rank order. Use one kind of "
            "device and one compression on all ranks."
        )
    if not is_on_gpu(example) or (is_rounded and len(set(nodes)) > 1):
        return members.new_communicator(name)
    return members.new_device_communicator(name, index_of(example), streams(index_of(example)))


def streams_of(named: Iterable[tuple[str, torch.Tensor]]) -> TorchStreams | None:
    """The streams of the GPU that the parameters are on; None for the host."""
    own = next((index_of(parameter) for _, parameter in named if is_on_gpu(parameter)), None)
    return None if own is None else streams(own)


def compression_between(
    communicator: Communicator[Any], wanted: Compression | None, streams: TorchStreams | None
) -> Compression | None:
    """What `communicator_for` makes of a compression: NCCL tries none, and those of 8 bits apply between hosts only.

    Args:
        communicator: made for it.
        wanted: as the user asks.
        streams: of the GPU with the gradients.

    Raises:
        ArgumentError: it would be chosen in the first steps, which a process that joins has not seen; or gradients are
            on GPUs of a job that goes on when ranks are lost.
    """
    is_own = wanted is not None and (wanted.name == AUTO or wanted.needs_host)  # not NCCL's
    if isinstance(communicator, DeviceCommunicator) and is_own:
        return None
    if wanted is not None and streams is not None and communicator.recovers and communicator.size > 1:
        current().refuse_to_recover("compression of gradients between GPUs")
    check_tried(wanted)
    return wanted


class BucketSets:
    """The sets of buckets of one averager, with the hooks that count gradients for them.

    Args:
        model: a module, or (name, parameter) pairs, equal on all ranks and in the same order.
        communicator: reduces the gradients.
        hooks: put on the parameters, anew whenever a bucket changes.
        streams: those of the GPU with the gradients; None on the host.
        sizes: of buckets.
        compression: as the user asks; None for unchanged.
        gathers_sparse: whether sparse gradients are gathered; if not, they are made dense.

    Attributes:
        model: as given.
        sparse: parameters whose gradients are gathered as sparse rows.
        named: (name, parameter) pairs that the hooks are on; a shared parameter once, by its first name.
        parameters: of `named`.
        claim: to the parameters that were ever trained.
        overlap, compression: whether reductions overlap backward, and how gradients travel between hosts.
        checks: what the averager's passes compare.
        sizes: of all buckets.
        kept: by which parameters are trained.
        seen: by position which were not frozen when `current` looked.
        holds: by position which take part though they may be frozen by now; empty for none.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Named],
        communicator: Communicator[Any],
        hooks: Hooks,
        streams: TorchStreams | None,
        sizes: BucketSizes,
        compression: Compression | None,
        gathers_sparse: bool,
    ) -> None:
        self.model, self._communicator, self._hooks, self._streams = model, communicator, hooks, streams
        self.sizes, self._compression, self._gathers_sparse = sizes, compression, gathers_sparse
        self.sparse = set[nn.Parameter]()
        if isinstance(model, nn.Module) and gathers_sparse:
            self.sparse = sparse_parameters(model)
        is_hosted = streams is None and compression is not None and compression.needs_host and communicator.size > 1
        if is_hosted and any(map(is_on_gpu, self.sparse)):
            raise ArgumentError(
                f"gradients {compression} travel through memory of the host, where those of GPUs cannot be gathered as "
                'sparse rows: pass sparse="densify", or compression="bf16".'
            )
        if self.sparse and communicator.recovers:
            current().refuse_to_recover('gathering sparse gradients (sparse="densify" works)')
        kind = type(model).__name__ if isinstance(model, nn.Module) else f"{len(model)} parameters"
        self.claim = Claim(f"{communicator.name} (of {kind})")
        self.overlap: Choice[bool] = ALWAYS
        self.compression: Choice[Compression | None] = UNCHANGED
        self.checks = TorchChecks(self.claim)
        self.named: list[Named] = []
        self.parameters: list[nn.Parameter] = []
        self.kept: dict[_Trained, GradientBuckets] = {}
        self.seen: _Trained = ()
        self._order: list[int] = []  # positions of gradients that have come, the first one first; equal on all ranks
        self._seen_registrations = 0
        self.holds: _Trained = ()
        self._held_sets = set[_Trained]()  # what each pass that only accumulated has trained
        self._waited_before, self._bytes_before = 0.0, 0  # of buckets that were dropped
        communicator.buffers_belong_to(self)

    def choose_ways(self, overlap: Wanted) -> None:
        """Choose how gradients in host memory are averaged, or begin to try; collective.

        Args:
            overlap: the user's choice, see `choose_overlap`.
        """
        if replaces():  # a process that joins has seen none of the steps that "auto" measures
            overlap = chosen_overlap(overlap) is True
        has_room = has_room_to_overlap(torch.get_num_threads())
        self.overlap = choose_overlap(overlap, has_room, self._communicator)
        self.compression = choose_compression(self._compression, node_rank(), self._communicator)

    # Parameters -------------------------------------------------------------------------------------

    def all_named(self) -> Iterable[Named]:
        """The (name, parameter) pairs of the model as it is now."""
        return named_parameters(self.model)

    def take_parameters(self) -> None:
        """Drop all buckets, and put hooks on the parameters that the model has now."""
        changes.note()
        self._hooks.remove()
        self.drop_all()
        self._seen_registrations = changes.registrations
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.all_named():
            names.setdefault(parameter, name)  # a shared parameter may be listed by each of its names
        held = {parameter for parameter, is_held in zip(self.parameters, self.holds, strict=False) if is_held}
        self.named = [(name, parameter) for parameter, name in names.items()]
        self.parameters, self.checks.weights.named = list(names), self.named
        self.holds = tuple(map(held.__contains__, names)) if held else ()
        self._held_sets = set()
        self._order = []
        self._put_hooks()

    def hold_trained(self) -> None:
        """Let what is trained now take part in passes, frozen or not, until `let_go`: it has gradients of its own."""
        trained = tuple(map(requires_grad, self.parameters))
        if self.holds != trained:
            changes.note()
            self._held_sets.add(trained)
            self.holds = tuple(map(operator.or_, trained, self.holds)) if self.holds else trained

    def let_go(self) -> None:
        """Let frozen parameters take no part again: all gradients are averages, or gone."""
        self.holds, self._held_sets = (), set()

    @property
    def is_ordinary(self) -> bool:
        """Whether `current` would return the same buckets again while no change is noted and `seen` is what it was."""
        return not (self.claim.is_contested or self.holds or changes.replaced or self._hooks.arrivals is not None)

    def _take_registered(self) -> None:
        """Take the parameters anew if some were registered with the module, or removed from it."""
        if isinstance(self.model, nn.Module) and changes.registrations != self._seen_registrations:
            self._seen_registrations = changes.registrations
            if [id(p) for p in self.model.parameters()] != [id(p) for p in self.parameters]:
                self.take_parameters()

    def _put_hooks(self) -> None:
        module = self.model if isinstance(self.model, nn.Module) else None
        self._hooks.put(self.parameters, [buckets.bucket_of for buckets in self.kept.values()], module)

    # Buckets ----------------------------------------------------------------------------------------

    def current(self, passes: int) -> GradientBuckets:
        """The buckets for the parameters that are trained now; collective if there are none yet.

        Args:
            passes: how many the averager has ended.

        Raises:
            MismatchError: the parameters differ among ranks.
            ArgumentError: a CUDA graph is being captured, and there are no buckets yet.
            RingError: another averager that is in use has some of the parameters.
        """
        self._take_registered()
        self.seen = trained = tuple(map(requires_grad, self.parameters))
        if self.holds and self.holds != trained:
            trained = tuple(map(operator.or_, trained, self.holds))
        buckets = self.kept.get(trained)  # looked up once: it may be thousands of parameters
        if buckets is None:
            buckets = self._make(trained, passes)
        buckets.has_others = self.claim.has_others
        buckets.replaced, buckets.noted = {}, ""
        if self._held_sets or changes.replaced:
            self._note(buckets, trained)
        if buckets.is_ordered == (self._hooks.arrivals is not None):
            self._hooks.arrivals = None if buckets.is_ordered else []
            self._put_hooks()
        return buckets

    def _note(self, buckets: GradientBuckets, trained: _Trained) -> None:
        """Note what a script has done with parameters that all ranks must have done, besides freezing some."""
        for name, one in itertools.compress(self.named, trained):
            if (found := changes.replaced.get(id(one))) is not None and found.old() is one:
                buckets.replaced[name] = found
        for other in sorted(self._held_sets - {trained}):
            names = [name for name, _ in itertools.compress(self.named, other)]
            buckets.noted += f"{' and ' if buckets.noted else ''}has trained only {listed(names)} in a pass before it"
            buckets.noted += f" ({zlib.crc32(repr(names).encode()):08x})" if len(names) > 1 else ""

    def replaced_by_untrained(self, buckets: GradientBuckets) -> list[str]:
        """Names of parameters of a pass that the model no longer uses, and whose new ones nobody averages."""
        used = {id(one) for group in self.checks.options.groups() for one in group.get("params", ())}
        return [
            name
            for name, found in buckets.replaced.items()
            if not found.is_used
            and any(one.requires_grad and not is_claimed(one) and id(one) not in used for one in found.new())
        ]

    def _make(self, trained: _Trained, passes: int) -> GradientBuckets:
        if len(self.kept) >= _KEPT:
            self._drop(next(iter(self.kept)))
        order = self._order_of(trained)
        with rejections_told(self._communicator, "making buckets"):
            if self._streams is not None and is_capturing():
                raise ArgumentError(
                    f"{self._communicator.name}: buckets would be made while a CUDA graph is being captured. Run "
                    "two ordinary steps with the same parameters before the capture: the first shows in which "
                    "order gradients come, the second makes the buckets for that order."
                )
            try:
                buckets = GradientBuckets(
                    *(self.named, self._communicator, self.sizes, self._compression, self.sparse),
                    *(self._gathers_sparse, order, self.overlap, self.checks, trained),
                    rounding=self.compression,
                )
            except MismatchError as error:
                self.explain(error, trained)
                raise
        self.kept[trained] = buckets
        buckets.reducer.passes = passes  # those of buckets that were dropped count, too
        self.claim.take(itertools.compress(self.named, trained), self._communicator)
        if not self._hooks.fit(buckets.bucket_of):
            self._put_hooks()
        return buckets

    def claim_alone(self) -> None:
        """Claim all parameters though nothing is averaged; else ranks of which each has its own would compare them."""
        self.claim.take(self.all_named(), self._communicator)
        self.claim.settle(self._communicator)

    def explain(self, error: MismatchError, trained: Sequence[bool]) -> None:
        """Say in an error what this rank has frozen or unfrozen, which the others may not have.

        Args:
            error: of a pass, or of making buckets.
            trained: by position which parameters take part in it.
        """
        before = next((one for one in reversed(self.kept) if one != trained and len(one) == len(trained)), None)
        if before is None:
            return
        found = [
            f"{name} was {'unfrozen' if now else 'frozen'}"
            for (name, _), then, now in zip(self.named, before, trained, strict=True)
            if then != now
        ]
        more = f" and {len(found) - 1} other changes" if len(found) > 1 else ""
        text = (
            f"{error} This rank has other buckets than before, since {found[0]}{more} (requires_grad). Freeze and "
            "unfreeze the same parameters on all ranks, between the same two steps, and not while a rank that has run "
            "out of data waits in join(): that one cannot do so."
        )
        error.args = (text,)  # what has been told to other ranks about it stays

    def learn_order(self, buckets: GradientBuckets) -> None:
        """Let the next backward make buckets in the order in which gradients have just come; collective."""
        trained = next((trained for trained, kept in self.kept.items() if kept is buckets), None)
        if trained is None:
            return
        place = {id(one): position for position, one in enumerate(self.parameters) if trained[position]}
        mine = list(dict.fromkeys(place[one] for one in self._hooks.arrivals or () if one in place))
        communicator = self._communicator
        first = communicator.broadcast_object(mine if communicator.rank == 0 else None, purpose="order of gradients")
        if not first:
            return
        late = sorted(set(place.values()).difference(first), reverse=True)
        self._order = [*first, *late, *(position for position in self._order if not trained[position])]
        buckets.is_ordered = buckets.fills_as([*first, *late])
        if not buckets.is_ordered:
            self._drop(trained)

    def _order_of(self, trained: _Trained) -> list[int] | None:
        """In which order the gradients of a set come; None as long as one of them has not come."""
        found = [position for position in self._order if trained[position]]
        return found if len(found) == sum(trained) else None

    def resize(self, sizes: BucketSizes) -> None:
        """Make buckets of other sizes from the next backward on."""
        if sizes != self.sizes:
            self.drop_all()
            self.sizes = sizes

    def drop_all(self) -> None:
        """Give the memory of all buckets back; gradients in it stay valid."""
        for trained in list(self.kept):
            self._drop(trained)

    def _drop(self, trained: _Trained) -> None:
        changes.note()
        buckets = self.kept.pop(trained)
        self._waited_before += buckets.reducer.waited
        self._bytes_before += buckets.reducer.reduced_bytes
        buckets.release()

    @property
    def layout(self) -> tuple[str, str]:
        """As in `BufferOwner`: what decides on buckets apart from the sets, and the sets that there are buckets for."""
        parameters = [(name, str(p.dtype), tuple(p.shape), tuple(p.stride())) for name, p in self.named]
        return _digest((parameters, tuple(self.sizes), str(self._compression))), _digest(list(self.kept))

    # Figures ----------------------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """Seconds that the script has waited for communication after its backwards."""
        return self._waited_before + sum(buckets.reducer.waited for buckets in self.kept.values())

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._bytes_before + sum(buckets.reducer.reduced_bytes for buckets in self.kept.values())


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
