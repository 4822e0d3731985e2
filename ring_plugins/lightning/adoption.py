"""One strategy object for either spelling of Lightning.

``from ring_plugins.lightning import RingStrategy`` names one class, yet a script may hand the object to the Trainer of
`lightning` or to that of `pytorch_lightning`, whose strategies share no base class. Each Trainer first checks that it
was given a ``Strategy`` and then sets its ``accelerator``: by that time the strategy has done nothing but remember its
arguments. So the twins pass as each other's ``Strategy``, and one that receives an accelerator of the other spelling
turns into its twin, constructed with the same arguments.
"""

from typing import Any

from ring_plugins.core.base.errors import ArgumentError

_twins: dict[type, type] = {}


def make_interchangeable(one: Any, other: Any) -> None:
    """Declare two strategy classes twins: equal but for the spelling of Lightning they derive from."""
    for strategy, twin in ((one, other), (other, one)):
        _twins[strategy] = twin
        _strategy_base(twin).register(strategy)


def move_to_spelling_of(accelerator: Any, strategy: Any) -> None:
    """Turn `strategy` into its twin if `accelerator` belongs to the twin's spelling of Lightning.

    Raises:
        ArgumentError: If `strategy` is of a user's own subclass, which has no twin.
    """
    if accelerator is None or isinstance(accelerator, strategy.accelerator_type):
        return
    own: Any = next(cls for cls in type(strategy).__mro__ if cls in _twins or cls is object)
    twin: Any = _twins.get(own)
    if twin is None or not isinstance(accelerator, twin.accelerator_type):
        return
    if own is not type(strategy):
        raise ArgumentError(
            f"{type(strategy).__name__} derives from the {own.__name__} of `{own.tree.package}`, but was given to a"
            f" Trainer of `{twin.tree.package}`. Derive it from {twin.__module__}.{twin.__name__} instead."
        )
    strategy.__class__ = twin
    twin.__init__(strategy, **strategy.arguments)


def _strategy_base(strategy: type) -> Any:
    """Lightning's ``Strategy``, which the Trainer of this spelling wants to see."""
    return next(cls for cls in strategy.__mro__ if cls.__name__ == "Strategy")
