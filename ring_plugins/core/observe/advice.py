"""One line during training, where much of a step is lost to communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ring_plugins.core.failure import Peer
from ring_plugins.core.observe.balance import Balance

#: Steps that are not looked at, since much happens in them for the first time, and those that are.
_WARM_UP, _STEPS = 10, 100
#: The share of a step that is worth a line, and the one that the advice leads to.
_MUCH, _LITTLE = 0.2, 0.1


class Advice:
    """Looks at a job's first steps, and says at most one line.

    Args:
        roster: where the ranks are.
        say: prints.
    """

    def __init__(self, roster: Sequence[Peer], say: Callable[[str], None]) -> None:
        self._roster, self._say = roster, say
        self._before: Balance | None = None
        self._given = False

    def look(self, total: Balance) -> None:
        """Some more steps are known."""
        if self._given or total.steps < _WARM_UP:
            return
        if self._before is None:
            self._before = total
        elif total.steps - self._before.steps >= _STEPS:
            self._given = True
            text = advice(total - self._before, self._roster)
            if text:
                self._say(text)


def advice(balance: Balance, roster: Sequence[Peer]) -> str:
    """What to say of these steps, "" for nothing."""
    computing, waiting, moving = balance.mean
    step = computing + waiting + moving
    last = f"in the last {balance.steps} steps"
    if moving > _MUCH * step:
        # moving / f is a tenth of the step that is left with it, whether moving shrinks f-fold or the rest grows.
        factor = (1 - _LITTLE) / _LITTLE * moving / (step - moving)
        between_hosts = len({peer.domain for peer in roster}) > 1
        batch = f"batch {factor:.1f} times as large on each rank"
        means = f"A network {factor:.1f} times as fast, or a {batch}," if between_hosts else f"A {batch}"
        return (
            f"{last} {moving / step:.0%} of the time ({_ms(moving)} of {_ms(step)} a step) went into moving "
            f"{balance.nbytes / 1e6:.3g} MB of gradients that backward did not hide. {means} would bring that to about "
            f"{_LITTLE:.0%}."
        )
    if waiting > _MUCH * step:
        rank = int(balance.slowest.argmax())
        return (
            f"{last} {waiting / step:.0%} of the time ({_ms(waiting)} of {_ms(step)} a step) "
            f"went into waiting for the slowest rank. That was rank {rank} on {roster[rank].host} in "
            f"{balance.slowest[rank] / balance.steps:.0%} of them."
        )
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
