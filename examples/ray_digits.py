"""Train a small network on scanned digits on the actors of a Ray cluster.

    python examples/ray_digits.py                                  # two actors on this machine
    ray job submit -- python examples/ray_digits.py --ranks 8      # on a running cluster

Every node needs this Python environment: `pip install "ring_plugins[ray,torch]" scikit-learn`.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--cpus", type=int, default=1, help="CPUs of each rank")
parser.add_argument("--epochs", type=int, default=10)


def train(epochs: int) -> float:
    """Run on every rank, in a process of its own; return the accuracy on data that was not trained on."""
    import torch
    from sklearn.datasets import load_digits

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

    ring.init()
    scans = load_digits()  # a job of your own reads the files of this rank here
    images, labels = torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target)
    training = torch.arange(1437)[ring.rank() :: ring.size()][: 1437 // ring.size()]  # equally many on all ranks

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * ring.size())
    optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    broadcast_parameters(model)  # all ranks begin with rank 0's weights
    for _ in range(epochs):
        for batch in training[torch.randperm(len(training))].split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # averaged here
            optimizer.step()
    if ring.rank() == 0:
        pass  # torch.save(model.state_dict(), ...) to storage that outlives the cluster

    held_out = torch.arange(1437, 1797)[ring.rank() :: ring.size()]
    with torch.no_grad():
        right = (model(images[held_out]).argmax(1) == labels[held_out]).sum()
    return ring.all_reduce(right, ring.SUM).item() / 360


if __name__ == "__main__":
    import os

    import ray

    import ring_plugins.ray

    arguments = parser.parse_args()
    # With RAY_ADDRESS set, as `ray job submit` does, this joins that cluster; otherwise it starts one here.
    ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else arguments.ranks * arguments.cpus)
    accuracies = ring_plugins.ray.run(
        train, args=(arguments.epochs,), num_workers=arguments.ranks, resources={"CPU": arguments.cpus}
    )
    print(f"ranks {len(accuracies)}, validation accuracy {accuracies[0]:.3f}")
