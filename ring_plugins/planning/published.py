"""Horovod's published throughputs, and what the model says of the same jobs: how far it may be trusted."""

from __future__ import annotations

from typing import NamedTuple

from ring_plugins.core.gradients.fusion import MIB, BucketSizes
from ring_plugins.planning.models import reference
from ring_plugins.planning.network import TRANSPORTS, Network
from ring_plugins.planning.simulation import Prediction, predict

_MODELS = ("inception-v3", "resnet-101", "vgg-16")
_PER_HOST = 4
#: Horovod's tensor fusion of that time put all tensors into buffers of up to 64 MB.
_FUSION = BucketSizes(64 * MIB, MIB, None)


class Row(NamedTuple):
    """A measured job.

    Attributes:
        model: a reference model.
        ranks: GPUs, four a host.
        network: Gbit/s and transport.
        alone: images a second of one GPU in that series.
        published: images a second of all.
        calibrates: whether the transport's efficiency was read off this row.
    """

    model: str
    ranks: int
    network: tuple[float, str]
    alone: float
    published: float
    calibrates: bool

    def predict(self) -> Prediction:
        """What the model says."""
        gigabits, transport = self.network
        network = Network(f"{gigabits:g} Gbit/s, {transport}", gigabits, TRANSPORTS[transport])
        return predict(reference(self.model, self.alone), network, self.ranks, _PER_HOST, _FUSION)

    @property
    def predicted(self) -> float:
        """Images a second that the model says."""
        return self.ranks * self.alone * self.predict().efficiency

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published; above 0 where the model is too hopeful."""
        return self.predicted / self.published - 1


def _series(
    ranks: int, network: tuple[float, str], alone: tuple[float, ...], published: tuple[float, ...], calibrates: str = ""
) -> list[Row]:
    return [
        Row(model, ranks, network, one, all_, model == calibrates)
        for model, one, all_ in zip(_MODELS, alone, published, strict=True)
    ]


_ONE = (134.4, 119.4, 130.9)
#: The last series was published as efficiencies.
ROWS = [
    *_series(16, (25.0, "rdma"), _ONE, (2022.6, 1746.2, 1787.4), "vgg-16"),
    *_series(16, (25.0, "tcp"), _ONE, (1990.7, 1685.1, 1308.7), "vgg-16"),
    *_series(16, (25.0, "cpu"), _ONE, (2073.3, 1338.3, 616.8), "vgg-16"),
    *_series(64, (40.0, "tcp"), (148.8, 136.0, 149.6), (7932.1, 7741.6, 6084.2)),
    *_series(512, (25.0, "rdma"), _ONE, tuple(512 * one * e for one, e in zip(_ONE, (0.9, 0.9, 0.68), strict=True))),
]
