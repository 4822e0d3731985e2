"""Small modules that the scenarios train; each logs or keeps what its scenario compares."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

FEATURES, CLASSES = 8, 3


def dataset(samples: int, seed: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    weight = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(x, (x @ weight).argmax(1), torch.arange(samples))


def loader(samples: int = 48, batch_size: int = 4, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset(samples), batch_size=batch_size, **kwargs)


def dealt(rank: int, size: int) -> DataLoader:
    """`loader()` dealt to the ranks in order: all ranks' batches together are one of `loader(batch_size=4 * size)`."""
    data = dataset(48)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, size, rank, shuffle=False))


class Resumable(DataLoader):
    """A loader that resumes where a checkpoint was written, which Lightning needs for resuming inside an epoch."""

    delivered = 0
    skipped = 0

    def __iter__(self) -> Any:
        skip, self.skipped = self.skipped, 0
        self.delivered = 0
        for batch in super().__iter__():
            self.delivered += 1
            if self.delivered > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["delivered"]


class Classifier(LightningModule):
    """Two layers; the base of most scenarios."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        self.learning_rate, self.momentum = learning_rate, momentum
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.seen: dict[str, list[int]] = {"fit": [], "validate": [], "test": [], "predict": []}

    def see(self, stage: str, batch: Any) -> None:
        self.seen[stage].extend(batch[2].tolist())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return F.cross_entropy(self(x.to(self.dtype)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see("fit", batch)
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("validate", batch)
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", batch)
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see("predict", batch)
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)


class WithAdam(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


class WithCodeBook(WithBatchNorm):
    """A buffer that training reads and writes, differently on each rank: all ranks use rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(FEATURES))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        if self.training:
            self.center.lerp_(x.mean(0), 0.5)
        return super().loss((x - self.center, *batch[1:]))


class WithConvolution(Classifier):
    """Batch norm with spatial dimensions, without affine parameters once, with a cumulative average once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            nn.Conv2d(2, 4, 2),
            nn.BatchNorm2d(4, affine=False),
            nn.Flatten(),
            nn.Linear(4, 6),
            nn.BatchNorm1d(6, momentum=None),
            nn.Linear(6, CLASSES),
        )


class WithUnusedParameters(Classifier):
    """One layer that no rank uses, and one that only rank 0 uses, on every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(FEATURES, 2)
        self.sometimes = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0 and batch_idx % 2 == 0:
            loss = loss + self.sometimes(batch[0]).square().mean()
        return loss


class Adversarial(LightningModule):
    """Two optimizers, optimized by hand, taking turns."""

    def __init__(self, accumulate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _, index = batch
        noise = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(int(index[0])))
        first, second = self.optimizers()
        last = not self.accumulate or batch_idx % 2 == 1
        with first.toggle_model(sync_grad=last):
            self.manual_backward(-self.critic(self.generator(noise)).mean())
            if last:
                self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                first.step()
                first.zero_grad()
        with second.toggle_model(sync_grad=last):
            fake = self.generator(noise).detach()
            loss = self.critic(fake).mean() - self.critic(x).mean() + self.critic(x).square().mean()
            self.manual_backward(loss)
            if last:
                second.step()
                second.zero_grad()
        self.log("critic_loss", loss, sync_dist=True, on_epoch=True, on_step=False, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.05),
        )


class WithInfinities(Classifier):
    """A gradient scaler must skip the same steps on all ranks although only one has infinite gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 0 else loss


class WithMetrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, batch_size=len(batch[0]))


class WithLogs(Classifier):
    """Logs floats and integers in every reduction, from batches of different size on each rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        index = batch[2]
        size = len(index)
        self.log("mean", index.float().mean(), sync_dist=True, batch_size=size)
        self.log("integers", index.sum(), sync_dist=True, batch_size=size)
        for name in ("min", "max", "sum"):
            value = getattr(index.float(), name)()
            self.log(name, value, sync_dist=True, reduce_fx=name, batch_size=size)


class Silent(Classifier):
    """Logs nothing: under torch 2.13 dynamo stumbles over ``self.log`` in a compiled step, with any strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class WithGather(Classifier):
    """Every rank's loss depends on every rank's features."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own = self(batch[0])
        everyone = self.all_gather(own, sync_grads=True).flatten(0, -2)
        return super().training_step(batch, batch_idx) + (own @ everyone.T).square().mean() * 1e-3


class WithEmbedding(Classifier):
    def __init__(self) -> None:
        super().__init__(momentum=0.0)
        self.embedding = nn.Embedding(10, CLASSES, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        x, y, index = batch
        return F.cross_entropy(self(x) + self.embedding(index % 10), y)


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("no room")


class RunsOutOfMemory(Classifier):
    """Cannot compute some batches on the last rank: forward raises, or backward between the layers, or all is well.

    One process on the concatenated batch, as a reference, returns None for all batches of the steps to be skipped.
    """

    def __init__(self, where: str = "", failing: tuple[int, ...] = (), skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.where, self.failing, self.skipped = where, failing, skipped

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        if batch_idx in self.failing and self.trainer.global_rank == self.trainer.world_size - 1:
            if self.where == "forward":
                raise MemoryError("no room")
            hidden = Breaks.apply(self.net[0](batch[0]))
            return F.cross_entropy(self.net[2](self.net[1](hidden)), batch[1])
        return self.loss(batch)


class WithLineSearch(Classifier):
    """Trained by LBFGS, which decides by the loss of its closure how far to go; by hand or by Lightning."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.evaluations = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=6, line_search_fn="strong_wolfe")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            self.evaluations += 1
            return self.loss(batch)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            self.evaluations += 1
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        return None
