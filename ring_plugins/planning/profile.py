"""What of a model decides how it scales: how many bytes its gradients have, and when in a step each is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import Entry


@dataclass(frozen=True)
class Gradient:
    """Of one parameter.

    Attributes:
        name: of the parameter.
        dtype: element type.
        count: elements.
        ready: seconds from the start of backward until it is complete.
    """

    name: str
    dtype: str
    count: int
    ready: float


@dataclass(frozen=True)
class Profile:
    """A training step of one process alone.

    Attributes:
        name: of the model.
        batch: samples a step.
        forward: seconds before backward, with everything else that comes before it.
        backward: seconds of backward.
        update: seconds after it.
        gradients: in the order of the model's parameters.
        source: where the times come from.
    """

    name: str
    batch: int
    forward: float
    backward: float
    update: float
    gradients: tuple[Gradient, ...]
    source: str

    @property
    def step(self) -> float:
        """Seconds of a step of one process alone."""
        return self.forward + self.backward + self.update

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(entry_bytes(gradient) for gradient in self.gradients)

    @property
    def entries(self) -> list[Entry]:
        """As the plan of buckets wants them."""
        return [Entry(g.name, g.dtype, g.count) for g in self.gradients]

    def at_step(self, seconds: float) -> Profile:
        """The same model on a device where a step takes `seconds`: all times change alike.

        Raises:
            ArgumentError: not a positive time.
        """
        if seconds <= 0:
            raise ArgumentError(f"a step of {seconds} seconds is not possible; give a positive time.")
        factor = seconds / self.step
        gradients = tuple(Gradient(g.name, g.dtype, g.count, g.ready * factor) for g in self.gradients)
        return Profile(
            self.name,
            self.batch,
            self.forward * factor,
            self.backward * factor,
            self.update * factor,
            gradients,
            f"{self.source}, scaled to the step time given",
        )

    def save(self, file: Path | str) -> None:
        """Write it as JSON."""
        Path(file).write_text(json.dumps({"ring_plugins_profile": 1, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(file: Path | str) -> Profile:
        """Read what `save` wrote.

        Raises:
            ArgumentError: the file is something else, or not there.
        """
        try:
            record = json.loads(Path(file).read_text())
            gradients = tuple(Gradient(**one) for one in record["gradients"])
            forward, backward, update = (float(record[name]) for name in ("forward", "backward", "update"))
            return Profile(record["name"], record["batch"], forward, backward, update, gradients, record["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{file} is no profile ({type(error).__name__}: {error}); make one with "
                "ring_plugins.planning.measure(model, batch, file=...)."
            ) from error


def entry_bytes(gradient: Gradient) -> int:
    """Bytes of a gradient."""
    from ring_plugins.core.arrays.dtypes import STORAGE

    return gradient.count * STORAGE[gradient.dtype].itemsize


def from_costs(
    name: str, batch: int, layers: Sequence[tuple[str, int, float]], step: float, source: str, update: float = 0.0
) -> Profile:
    """A profile of a model of which only the arithmetic is known.

    Backward takes twice as long as forward (it computes two products where forward computes one), and each layer takes
    its share of the arithmetic.

    Args:
        name, batch, source: as in `Profile`.
        layers: (name, parameters, operations a sample) in the order of forward.
        step: seconds of a whole step.
        update: seconds of it that the update takes.
    """
    forward = (step - update) / 3
    backward = 2 * forward
    total = sum(operations for _, _, operations in layers)
    ready, done = [0.0] * len(layers), 0.0
    for i in reversed(range(len(layers))):
        done += layers[i][2] / total
        ready[i] = done * backward
    gradients = tuple(
        Gradient(layer, "float32", count, at) for (layer, count, _), at in zip(layers, ready, strict=True) if count
    )
    return Profile(name, batch, forward, backward, update, gradients, source)
