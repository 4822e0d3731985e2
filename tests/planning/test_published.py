"""Compare predictions with the published throughput of Horovod jobs."""

import re
import statistics
from typing import NamedTuple

from ring_plugins.core.gradients.fusion import MIB, BucketSizes
from ring_plugins.planning.models import reference
from ring_plugins.planning.simulation import TRANSPORTS, Network, Prediction, predict
from tests.launch import REPOSITORY

MODELS = ("inception-v3", "resnet-101", "vgg-16")
PER_HOST = 4
#: Horovod's tensor fusion put all tensors at the time into buffers of up to 64 MB.
FUSION = BucketSizes(64 * MIB, MIB, None)


class Row(NamedTuple):
    """A measured job.

    Attributes:
        model: a reference model.
        ranks: GPUs, four per host.
        network: Gbit/s and transport.
        alone: images per second of one GPU in that series.
        published: images per second of all GPUs.
        calibrates: whether the transport's efficiency was taken from this row.
    """

    model: str
    ranks: int
    network: tuple[float, str]
    alone: float
    published: float
    calibrates: bool

    def predict(self) -> Prediction:
        """Predict its step."""
        gigabits, transport = self.network
        network = Network(f"{gigabits:g} Gbit/s, {transport}", gigabits, TRANSPORTS[transport])
        return predict(reference(self.model, self.alone), network, self.ranks, PER_HOST, FUSION)

    @property
    def predicted(self) -> float:
        """Images per second."""
        return self.ranks * self.alone * self.predict().efficiency

    @property
    def error(self) -> float:
        """Error of the prediction relative to the published throughput; positive if the prediction is too high."""
        return self.predicted / self.published - 1


def series(
    ranks: int, network: tuple[float, str], alone: tuple[float, ...], published: tuple[float, ...], calibrates: str = ""
) -> list[Row]:
    return [
        Row(model, ranks, network, one, all_, model == calibrates)
        for model, one, all_ in zip(MODELS, alone, published, strict=True)
    ]


ONE = (134.4, 119.4, 130.9)
#: The last series was published as efficiencies.
ROWS = [
    *series(16, (25.0, "rdma"), ONE, (2022.6, 1746.2, 1787.4), "vgg-16"),
    *series(16, (25.0, "tcp"), ONE, (1990.7, 1685.1, 1308.7), "vgg-16"),
    *series(16, (25.0, "cpu"), ONE, (2073.3, 1338.3, 616.8), "vgg-16"),
    *series(64, (40.0, "tcp"), (148.8, 136.0, 149.6), (7932.1, 7741.6, 6084.2)),
    *series(512, (25.0, "rdma"), ONE, tuple(512 * one * e for one, e in zip(ONE, (0.9, 0.9, 0.68), strict=True))),
]


def test_predictions_of_horovods_published_jobs():
    errors = [abs(row.error) for row in ROWS]
    assert statistics.median(errors) < 0.05
    assert statistics.median(abs(row.error) for row in ROWS if not row.calibrates) < 0.05
    assert max(errors) < 0.20


def test_the_errors_in_the_documentation_are_these():
    page = (REPOSITORY / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d+) \| .* \| ([+-][\d.]+) % \|", page, re.MULTILINE)
    assert [(row.model, str(row.ranks), f"{100 * row.error:+.1f}") for row in ROWS] == rows
