"""Two ranks train, of which each sees GPUs of its own, or in an order of its own: `visible.py "0;0" "1;GPU-01"`.

The arguments are, by rank, the number of its GPU among those that it sees, and CUDA_VISIBLE_DEVICES.
"""

import os
import sys

import torch

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
index, devices = (words.split(";")[ring.rank()] for words in sys.argv[1:])
os.environ["CUDA_VISIBLE_DEVICES"] = devices  # before CUDA starts
torch.cuda.set_device(int(index))
report("count", torch.cuda.device_count())
model = torch.nn.Linear(3, 2).cuda()
try:
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 3), float(step + ring.rank()), device="cuda")).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    report("same", all(other == weights for other in ring.all_gather_object(weights)))
    report("device", str(model.weight.device))
except ring.RingError as error:
    report("error", str(error))
