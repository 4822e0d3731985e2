"""`hvd.elastic` of `import ring_plugins.horovod.torch as hvd`: training goes on when ranks are lost or added."""

from ring_plugins.horovod.elastic import run
from ring_plugins.horovod.torch.elastic.sampler import ElasticSampler
from ring_plugins.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
