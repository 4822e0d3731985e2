"""One number that grows whenever something happens that an ordinary training step does not do.

An averager has to know, at the first gradient of each backward, whether another averager has taken its parameters,
whether parameters were registered or replaced, whether ranks train other parameters, whether averaging has failed.
Whatever file notices one of these calls `note`. An averager that has looked at all of them once, and found nothing,
compares one number from then on.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)
#: Of the last change in this process; no two changes have the same.
last = 0


def note() -> None:
    """Note a change, of whatever kind; all averagers look again."""
    global last
    last = next(_numbers)  # also in several threads: who reads the last one has missed none
