"""A rank of the fault campaign: `fault_worker.py MODEL STEPS DIRECTORY`, or `main` under Ray and Spark.

It trains for so many steps and reports a digest of its weights. On SIGUSR2 it does to itself what the file "fault" in
DIRECTORY names; the campaign does to it from outside what a process cannot do to itself.
"""

import contextlib
import gc
import hashlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np

import ring_plugins as ring
from tests.worker import report, report_pid

HELD: list[bytes] = []
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
#: Between steps, so that a run lasts a few seconds and faults fall between and into collectives.
PAUSE_SECONDS = 0.005


class InjectedFault(Exception):
    """What a user's code might raise."""


def raise_an_exception() -> None:
    raise InjectedFault("the injected fault")


def use_up_memory() -> None:
    """From now on no more than 64 KiB of new memory, as if others had taken the rest."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 65_536, resource.RLIM_INFINITY))


def need_memory() -> None:
    """Use more than the control group, into which the campaign has put this process, allows."""
    HELD.extend(b"x" * (8 << 20) for _ in range(64))


def use_up_files() -> None:
    """No further file descriptor can be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def fill_the_disk() -> None:
    """No file can be extended any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def step_the_clock() -> None:
    """The time of day jumps by an hour, as when a clock is set."""
    real = time.time
    offset = 3600 if os.getpid() % 2 else -3600
    time.time = lambda: real() + offset


def close_a_connection() -> None:
    """Shut down one connection of this process, as a broken network card or an eager firewall would."""
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:") and descriptor > 2:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        connection.shutdown(socket.SHUT_RDWR)
                        return


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raise_an_exception,
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(3)": lambda: os._exit(3),
    "memory": use_up_memory,
    "memory of a cgroup": need_memory,
    "files": use_up_files,
    "disk": fill_the_disk,
    "clock": step_the_clock,
    "connection": close_a_connection,
    "garbage": lambda: gc.collect() and None,
}


def lift_limits() -> None:
    """Allow again what a fault forbade, for the report at the end."""
    for limit in LIMITS:
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)


def report_step(step: int) -> None:
    """Report without failing for want of files or disk: what this package does without them is in question."""
    with contextlib.suppress(OSError):
        report("step", step)
    time.sleep(PAUSE_SECONDS)


def numpy_steps(steps: int) -> Callable[[], bytes]:
    weights = np.zeros(50_000, np.float32)
    generator = np.random.default_rng(ring.rank())
    for step in range(steps):
        weights += ring.all_reduce(generator.standard_normal(weights.size, np.float32))
        if step % 50 == 49:
            ring.barrier()
        report_step(step)
    return weights.tobytes


def torch_steps(steps: int) -> Callable[[], bytes]:
    import torch

    from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

    torch.manual_seed(ring.rank())
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 20)).square().mean().backward()
        optimizer.step()
        report_step(step)
    return lambda: b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())


def lightning_steps(steps: int) -> Callable[[], bytes]:
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from ring_plugins.lightning import RingStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(20, 2)

        def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
            report_step(batch_index)
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    lightning.seed_everything(1, verbose=False)
    ranks = ring.size()
    data = TensorDataset(torch.randn(steps * ranks * 4, 20))
    model = Model()
    trainer = lightning.Trainer(
        strategy=RingStrategy(),
        accelerator="cpu",
        devices=ring.local_size(),
        num_nodes=ring.num_nodes(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    return lambda: b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())


def keras_steps(steps: int) -> Callable[[], bytes]:
    import keras

    from ring_plugins.keras import BroadcastCallback

    class Slowly(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            report_step(batch)

    keras.utils.set_random_seed(1 + ring.rank())
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30, "relu"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    data = np.random.default_rng(ring.rank()).standard_normal((steps * 4, 20)).astype("float32")
    model.fit(data, data[:, :2], batch_size=4, verbose=0, shuffle=False, callbacks=[BroadcastCallback(), Slowly()])
    return lambda: b"".join(weight.tobytes() for weight in model.get_weights())


MODELS = {"numpy": numpy_steps, "torch": torch_steps, "lightning": lightning_steps, "keras": keras_steps}


def main(name: str, steps: str, directory: str) -> None:
    def inject(number: int, frame: FrameType | None) -> None:
        report("faulted", time.time())
        FAULTS[(Path(directory) / "fault").read_text()]()

    signal.signal(signal.SIGUSR2, inject)
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    ring.barrier()
    report_pid()
    weights = MODELS[name](int(steps))
    lift_limits()
    report("digest", hashlib.sha256(weights()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
