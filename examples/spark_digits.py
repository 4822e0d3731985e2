"""Train a small network on scanned digits on the executors of a Spark cluster.

    python examples/spark_digits.py                                                  # two executors on this machine
    spark-submit --master yarn --num-executors 4 examples/spark_digits.py --ranks 4  # on a cluster

Every executor needs this Python environment: `pip install "ring_plugins[spark,torch]" scikit-learn`, or the archive
that `--archives` ships. For several threads per rank, set `spark.task.cpus`.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="Spark tasks; each is one rank")
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
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    import ring_plugins.spark

    arguments = parser.parse_args()
    builder = SparkSession.builder
    if not SparkConf().contains("spark.master"):  # spark-submit sets it
        builder = builder.master("local-cluster[2,1,1024]")
    spark = builder.getOrCreate()
    accuracies = ring_plugins.spark.run(train, args=(arguments.epochs,), num_proc=arguments.ranks)
    print(f"ranks {len(accuracies)}, validation accuracy {accuracies[0]:.3f}")
    spark.stop()
