"""What differs between the two spellings of Lightning, said once.

`lightning` and `pytorch_lightning` are the same sources under two names: nothing that one of them defines is an
instance of the other's classes. Our own logic is therefore written against neither (`parallel`, `strategy`, `fabric`),
and a `Tree` hands it the few things of Lightning's that it calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tree:
    """One spelling of Lightning.

    Attributes:
        package: What a user imports, ``"lightning"`` or ``"pytorch_lightning"``.
        reset_seed: Seeds this process again as ``seed_everything`` did in it or in the process it comes from.
        trainer_launcher: Starts workers by fork or spawn for a Trainer, as notebooks need it.
        fabric_launcher: The same for Fabric.
        is_interactive: Whether Lightning believes it runs in a notebook or at a prompt.
    """

    package: str
    reset_seed: Callable[[], Any]
    trainer_launcher: Callable[..., Any]
    fabric_launcher: Callable[..., Any]
    is_interactive: bool


#: Stands for Lightning's ``ParallelStrategy`` where our logic is written; `for_lightning` and `for_pytorch_lightning`
#: put theirs behind it. To a type checker it is anything, being one class at one time and its namesake at another.
ParallelStrategy: Any = object
