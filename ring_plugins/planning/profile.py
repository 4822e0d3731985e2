"""The profile of a model: the bytes of its gradients, and the time in a step at which each is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import Entry


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        name: name of the parameter.
        dtype: element type.
        count: number of elements.
        ready: seconds from the start of backward until it is complete.
    """

    name: str
    dtype: str
    count: int
    ready: float


@dataclass(frozen=True)
class Profile:
    """A training step of a single process.

    Attributes:
        name: name of the model.
        batch: samples per step.
        forward: seconds from the start of the step to the start of backward.
        backward: seconds of backward.
        update: seconds after backward.
        gradients: gradients in the order of the model's parameters.
        source: source of the times, for display.
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
        """Seconds of a step."""
        return self.forward + self.backward + self.update

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(entry_bytes(gradient) for gradient in self.gradients)

    @property
    def entries(self) -> list[Entry]:
        """The gradients as arguments of `FusionPlan`."""
        return [Entry(g.name, g.dtype, g.count) for g in self.gradients]

    def at_step(self, seconds: float) -> Profile:
        """The same model on a device on which a step takes `seconds`; all times are scaled.

        Raises:
            ArgumentError: `seconds` is not positive.
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
        """Write the profile as JSON."""
        Path(file).write_text(json.dumps({"ring_plugins_profile": 1, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(file: Path | str) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ArgumentError: the file is missing, or is not a profile.
        """
        try:
            record = json.loads(Path(file).read_text())
            gradients = tuple(Gradient(**one) for one in record["gradients"])
            forward, backward, update = (float(record[name]) for name in ("forward", "backward", "update"))
            return Profile(record["name"], record["batch"], forward, backward, update, gradients, record["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{file} is not a profile ({type(error).__name__}: {error}); make one with "
                "ring_plugins.planning.measure(model, batch, file=...)."
            ) from error


def entry_bytes(gradient: Gradient) -> int:
    """Bytes of a gradient."""
    from ring_plugins.core.arrays.dtypes import STORAGE

    return gradient.count * STORAGE[gradient.dtype].itemsize


def from_costs(
    name: str, batch: int, layers: Sequence[tuple[str, int, float]], step: float, source: str, update: float = 0.0
) -> Profile:
    """Derive a profile from the arithmetic of each layer and the time of the whole step.

    Backward takes twice as long as forward, since it computes two products for each of forward's. The time of each
    layer is in proportion to its arithmetic.

    Args:
        name, batch, source: as in `Profile`.
        layers: (name, parameters, operations per sample) in the order of forward.
        step: seconds of a whole step.
        update: seconds of the update, which is part of the step.
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
