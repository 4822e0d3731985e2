"""The plans of a model's gradients: one for each set of parameters that is not frozen, and for all sizes of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes
from ring_plugins.core.gradients.reducer import Fill, GradientReducer
from ring_plugins.torch.buckets import GradientBuckets, Named
from ring_plugins.torch.device import TorchStreams, streams
from ring_plugins.torch.sparse import average_sparse

#: Plans kept for models that take turns in freezing their parts, as adversarial training does twice a step.
_KEPT = 4


class Plan(NamedTuple):
    """What is reduced while the same parameters are frozen.

    Attributes:
        buckets, reducer: for the dense gradients.
        entries: by position in the list of all parameters the entry of the plan, -1 for those without.
        sparse: parameters whose gradients are gathered.
    """

    buckets: GradientBuckets
    reducer: GradientReducer
    entries: list[int]
    sparse: list[nn.Parameter]


class GradientPlans:
    """Makes the plans as they are needed, and gives their memory back.

    Args:
        communicator: reduces the gradients; used by nobody else.
        sizes: of buckets.
        compression: how gradients travel, as they are by default.
        sparse: parameters whose gradients are known to be sparse, and are gathered.
        gathers: whether others that turn out to be sparse are gathered too, or made dense.

    Attributes:
        streams: torch's, where gradients are on a GPU.
        parameters: all that there are, frozen ones too.
    """

    def __init__(
        self,
        communicator: Communicator[Any],
        sizes: BucketSizes,
        compression: Compression | None,
        sparse: set[nn.Parameter],
        gathers: bool,
    ) -> None:
        self._communicator, self._compression = communicator, compression
        self._sizes, self._sparse, self._gathers = sizes, sparse, gathers
        self.streams: TorchStreams | None = None
        if isinstance(communicator, DeviceCommunicator):
            self.streams = streams(communicator.device)
        self.parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._plans: dict[tuple[tuple[bool, ...], BucketSizes], Plan] = {}
        self._waited_before, self._bytes_before = 0.0, 0

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self._waited_before + sum(plan.reducer.waited for plan in self._plans.values())

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._bytes_before + sum(plan.reducer.reduced_bytes for plan in self._plans.values())

    @property
    def sizes(self) -> BucketSizes:
        """Sizes of buckets in plans that are made from now on; setting others forgets the plans."""
        return self._sizes

    @sizes.setter
    def sizes(self, sizes: BucketSizes) -> None:
        if sizes != self._sizes:
            self.forget()  # one set of buckets at a time
            self._sizes = sizes

    def take(self, named: Sequence[Named]) -> None:
        """These are the parameters now; plans for others are forgotten."""
        self.forget()
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]

    def name(self, position: int) -> str:
        """Of a parameter, for texts."""
        return self._names[position]

    def current(self) -> Plan:
        """The plan for the parameters that are not frozen now; collective if there is none yet."""
        key = (tuple([p.requires_grad for p in self.parameters]), self._sizes)
        if key not in self._plans:
            if len(self._plans) >= _KEPT:
                self._drop(next(iter(self._plans)))
            self._plans[key] = self._make()
        return self._plans[key]

    def _make(self) -> Plan:
        positions = [i for i, p in enumerate(self.parameters) if p.requires_grad and p not in self._sparse]
        buckets = GradientBuckets(
            [(self._names[i], self.parameters[i]) for i in positions],
            self._communicator,
            self._sizes,
            self._compression,
        )
        buckets.collects_sparse = self._gathers
        entries = [-1] * len(self.parameters)
        for entry, position in enumerate(positions):
            entries[position] = entry
        sparse = [p for p in self.parameters if p.requires_grad and p in self._sparse]
        reducer = GradientReducer(
            buckets.buffer, self._communicator, self._filling(buckets), compression=self._compression
        )
        return Plan(buckets, reducer, entries, sparse)

    def _filling(self, buckets: GradientBuckets) -> Fill:
        """How a bucket is filled: on a GPU only after every stream that its gradients were computed on."""
        streams_of_gradients = self.streams
        if streams_of_gradients is None:
            return buckets.fill

        def fill(bucket: Bucket) -> list[Memory]:
            streams_of_gradients.catch_up()
            return buckets.fill(bucket)

        return fill

    def finish(self, plan: Plan) -> None:
        """End a pass: every gradient of the plan is the average when this returns."""
        plan.reducer.finish()
        plan.buckets.settle()
        found = self._learn_sparse(plan.buckets) if plan.buckets.collects_sparse else []
        for parameter in (*plan.sparse, *found):
            average_sparse(parameter, self._communicator)

    def _learn_sparse(self, buckets: GradientBuckets) -> list[nn.Parameter]:
        """After a plan's first pass: agree on which gradients are sparse; they are gathered from now on."""
        buckets.collects_sparse = False
        everyones = self._communicator.all_gather_object(sorted(buckets.sparse))
        found = [buckets.parameters[i] for i in sorted({i for seen in everyones for i in seen})]
        if found:
            self._sparse.update(found)
            self.forget()  # the next backward builds plans without them
        return found

    def forget(self) -> None:
        """Give the memory of all plans back; gradients in it stay valid."""
        for key in list(self._plans):
            self._drop(key)

    def _drop(self, key: tuple[tuple[bool, ...], BucketSizes]) -> None:
        plan = self._plans.pop(key)
        self._waited_before += plan.reducer.waited
        self._bytes_before += plan.reducer.reduced_bytes
        plan.buckets.release()
