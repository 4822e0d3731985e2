"""Whether all ranks' weights and their optimizers' options stay equal: compared after 2, 4, 8... steps.

Averaged gradients keep weights equal only if nothing else changes them on one rank: noise behind the averages, an
option that one rank changes, a callback that sets weights. The comparison after the first step finds what is wrong from
the start; this one finds what begins later. It reads all weights, so seldom that it cannot be measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.base.errors import DriftError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.validation import differing_options, options_of
from ring_plugins.observe.consistency import Checksums, differing_weights

#: Why weights may differ, if nothing else is known.
LIKELY_CAUSES = (
    "A rank has changed its weights or averages in a way of its own: a callback or a train_step that sets weights, "
    "noise or clipping behind the averages, a condition that is true on some ranks only, an optimizer that draws "
    "random numbers, or a memory error. Continue from a checkpoint, or broadcast the weights of a rank you trust. If "
    "they differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."
)


def check_drift(
    checksums: Checksums, optimizers: Sequence[Any], when: str, communicator: Communicator[Any], cause: str = ""
) -> None:
    """Check that weights and options are the same on all ranks; collective. RING_WEIGHT_CHECK=0 switches it off.

    Args:
        checksums: returns those of this rank's weights.
        optimizers: whose options are compared.
        when: begins the text of the error, such as "after the 4th step".
        communicator: of all ranks.
        cause: why the weights differ, if this rank knows.

    Raises:
        DriftError: the weights differ; raised on all ranks.
        MismatchError: only options differ; raised on all ranks.
    """

    def with_options() -> tuple[list[str], list[int]]:
        names, sums = checksums()  # first, since on JAX it gives the optimizer's variables their values, too
        return [*names, "options"], [*sums, zlib.crc32(repr(list(map(options_of, optimizers))).encode())]

    if not differing_weights(with_options, when, communicator):
        return
    found = differing_weights(checksums, when, communicator)
    if options := differing_options(optimizers, communicator):
        cause = f"The cause is likely that {options}. Set the same on all ranks."
    if found:
        raise DriftError(f"{found} {cause or LIKELY_CAUSES}")
    if options:
        raise MismatchError(f"{options}, so their weights would drift apart. Set the same on all ranks.")
