"""Averages of gradients that have the same bits on any number of ranks.

A sum of floating-point numbers depends on the order of its terms. An all-reduce adds up what each rank has added up
before, so its terms are other ones as soon as the ranks are. Here each term is the gradient of one micro-batch, and all
ranks add all of them up in the order of the micro-batches: the result is that of one process that accumulates them.

For that every rank gets every term, so a step moves as many times the model's size as it has micro-batches, where an
all-reduce moves about two; and it holds them, in pieces. Considered and rejected: sums of integers on a grid that the
largest gradient decides, which need another exchange before, and lose infinities; and float64, whose sums of float32
only differ less often.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from ring_plugins.core.base.errors import ArgumentError, MembersLost
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.world import current
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.tensor_memory import dense_memory, gradient_dtype, memory_like

#: Bytes of each micro-batch's gradients that are exchanged together.
_PIECE = 4 << 20


class ExactAverages:
    """The gradients of one step of an averager.

    Args:
        averager: whose parameters they are of. It averages nothing meanwhile.
    """

    def __init__(self, averager: GradientAverager) -> None:
        self._averager = averager
        self._terms: dict[int, list[torch.Tensor | None]] = {}  # by micro-batch, and by parameter

    @torch.no_grad()
    def take(self, number: int, weight: float) -> None:
        """Take the gradients of a micro-batch away from the parameters.

        Args:
            number: of the micro-batch, by which terms are ordered.
            weight: its samples, divided by those of a full one.
        """
        terms: list[torch.Tensor | None] = []
        for name, parameter in self._averager.named_parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.is_sparse:
                error = ArgumentError(
                    f"the gradient of {name} is sparse, which GlobalBatches(exact=True) does not support: use "
                    "sparse=False in the embedding, or exact=False."
                )
                self._averager.communicator.reject("exact averages", error)
                raise error
            terms.append(gradient if gradient is None or weight == 1 else gradient * weight)
        self._terms[number] = terms
        self._averager.forget_gradients()

    @torch.no_grad()
    def finish(self, by_rank: Sequence[Sequence[int]], weight: float) -> bool:
        """Make averages of all ranks' gradients; a parameter that has none anywhere keeps None.

        Args:
            by_rank: the numbers of all micro-batches.
            weight: what to divide the sums by.

        Returns:
            Whether the ranks are to change.

        Raises:
            MembersLost: ranks were lost, and their terms with them.
            MismatchError: the ranks differ in what passes compare.
        """
        averager, communicator = self._averager, self._averager.communicator
        has = [[term is not None for term in self._terms[number]] for number in by_rank[communicator.rank]]
        number = averager.checks.number()
        told = communicator.all_gather_object((number, averager.wants_change(), has), "exact averages")
        if len(told) != len(by_rank):
            raise MembersLost("The step is computed once more.", -1)
        if any(of_rank != number for of_rank, *_ in told):
            averager.checks.say(communicator)
        averager.checks.note_compared()
        masks = [mask for *_, of_rank in told for mask in of_rank]
        trained = [i for i in range(len(averager.named_parameters)) if any(mask[i] for mask in masks)]
        for piece in _pieces([averager.named_parameters[i][1] for i in trained]):
            self._average([trained[i] for i in piece], by_rank, weight)
        averager.note_averages()
        return any(wants_change for _, wants_change, _ in told)

    def _average(self, entries: Sequence[int], by_rank: Sequence[Sequence[int]], weight: float) -> None:
        """Average the gradients of some parameters of one dtype, which are given by their places."""
        averager, communicator = self._averager, self._averager.communicator
        parameters = [averager.named_parameters[i][1] for i in entries]
        sizes = [parameter.numel() for parameter in parameters]
        like, own = parameters[0], by_rank[communicator.rank]
        mine = torch.zeros((len(own), sum(sizes)), dtype=gradient_dtype(like), device=like.device)
        for row, number in zip(mine, own, strict=True):
            for part, i in zip(torch.split(row, sizes), entries, strict=True):
                if (term := self._terms[number][i]) is not None:
                    part.copy_(term.reshape(-1))
        rows = mine
        if communicator.size > 1:
            rows = mine.new_empty((sum(map(len, by_rank)), sum(sizes)))
            counts = [len(numbers) * sum(sizes) for numbers in by_rank]
            with purpose("exact averages"):
                communicator.all_gather(dense_memory(mine), dense_memory(rows), counts)
        numbers = list(itertools.chain.from_iterable(by_rank))
        first, *others = sorted(range(len(numbers)), key=numbers.__getitem__)
        total = rows[first].clone()
        for row in others:
            total.add_(rows[row])
        total.div_(weight)
        for parameter, part in zip(parameters, torch.split(total, sizes), strict=True):
            average = part.view(parameter.shape)
            parameter.grad = average if parameter.is_contiguous() else memory_like(parameter).copy_(average)


def average_exactly(parts: Sequence[ExactAverages], by_rank: Sequence[Sequence[int]], weight: float) -> bool:
    """Make the averages of a step; returns whether they are complete, which they are not if ranks were lost.

    Args:
        parts: of all averagers.
        by_rank, weight: as of `ExactAverages.finish`.
    """
    try:
        members_change = [part.finish(by_rank, weight) for part in parts]
    except MembersLost:
        return False
    if any(members_change):
        current().elastic.change_members()
        current().elastic.tell_changes()
    return True


def _pieces(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Places of parameters of one dtype whose gradients are exchanged together."""
    piece, held = list[int](), 0
    for i, parameter in enumerate(parameters):
        size = parameter.numel() * parameter.element_size()
        if piece and (held + size > _PIECE or parameters[piece[0]].dtype != parameter.dtype):
            yield piece
            piece, held = [], 0
        piece.append(i)
        held += size
    if piece:
        yield piece
