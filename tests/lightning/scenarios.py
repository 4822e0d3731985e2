"""Trainings that run with ``strategy="ddp"`` over gloo and again with ours, in the same processes, on the same data.

A scenario gets a `Run`, makes its trainers with it, and returns named values to compare: tensors, numbers, lists. Names
that start with "own_" may differ from rank to rank; all others must be bitwise equal on all ranks.
"""

import contextlib
import copy
import io
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader, RandomSampler

from ring_plugins.lightning import RingEnvironment, RingStrategy
from tests.lightning import models
from tests.lightning.models import Classifier, dealt, loader

Outcome = dict[str, Any]


_shuffling = data_connector._get_distributed_sampler


def _in_order(loader: DataLoader, shuffle: bool, *args: Any, **kwargs: Any) -> Any:
    return _shuffling(loader, shuffle and isinstance(loader.sampler, RandomSampler), *args, **kwargs)


@dataclass
class Run:
    """Makes trainers with one strategy or the other."""

    kind: str
    rank: int
    size: int
    directory: Path = field(default_factory=lambda: Path(os.environ["TEST_REPORTS"]))

    def strategy(self, **ddp: Any) -> Any:
        if self.kind == "ring":
            return RingStrategy(shard_optimizer=os.environ.get("TEST_SHARD") == "1")
        if self.size == 1:
            # A world of size 1 must train as without a strategy; DDP would shuffle with its own sampler.
            return SingleDeviceStrategy("cpu")
        return DDPStrategy(cluster_environment=RingEnvironment(), process_group_backend="gloo", **ddp)

    def trainer(self, ddp: dict[str, Any] | None = None, **kwargs: Any) -> Trainer:
        if self.kind != "ring":
            data_connector._get_distributed_sampler = _in_order  # else DDP shuffles what does not shuffle
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.size,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.directory,
            "strategy": self.strategy(**(ddp or {})),
        }
        return Trainer(**{**defaults, **kwargs})

    def fit(self, model: LightningModule, ddp: dict[str, Any] | None = None, **kwargs: Any) -> Outcome:
        trainer = self.trainer(ddp, **kwargs)
        trainer.fit(model, loader(), loader(24))
        return weights(model) | metrics(trainer)


@dataclass(frozen=True)
class Scenario:
    function: Callable[[Run], Outcome]
    ranks: tuple[int, ...]
    same_as_ddp: bool
    exact: bool
    slow: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    ranks: tuple[int, ...] = (2,), same_as_ddp: bool = True, exact: bool = True, slow: bool = False
) -> Callable[[Any], Any]:
    """Register a scenario.

    Args:
        ranks: World sizes it is run at.
        same_as_ddp: Whether it is run with DDP too; if not, its outcome includes the expected values.
        exact: Whether two ranks must agree with DDP to the last bit. (Three do not: DDP divides before it adds.)
        slow: Whether it takes seconds, and is run by `pytest -m slow` only.
    """

    def enter(function: Callable[[Run], Outcome]) -> Callable[[Run], Outcome]:
        SCENARIOS[function.__name__] = Scenario(function, ranks, same_as_ddp, exact, slow)
        return function

    return enter


def weights(model: LightningModule) -> Outcome:
    return {f"state.{name}": value.detach().clone() for name, value in model.state_dict().items()}


def metrics(trainer: Trainer) -> Outcome:
    return {f"metric.{name}": value.detach().clone() for name, value in trainer.callback_metrics.items()}


ALL = (1, 2, 3)


@scenario(ALL)
def plain(run: Run) -> Outcome:
    return run.fit(Classifier())


@scenario(ALL)
def adam_scheduler_accumulation(run: Run) -> Outcome:
    return run.fit(models.WithAdam(), accumulate_grad_batches=4)


@scenario()
def clipping_by_norm(run: Run) -> Outcome:
    return run.fit(Classifier(), gradient_clip_val=0.05)


@scenario()
def clipping_by_value(run: Run) -> Outcome:
    return run.fit(Classifier(), gradient_clip_val=0.01, gradient_clip_algorithm="value", accumulate_grad_batches=2)


@scenario()
def precision_bf16_mixed(run: Run) -> Outcome:
    return run.fit(Classifier(), precision="bf16-mixed")


@scenario()
def precision_16_mixed(run: Run) -> Outcome:
    return run.fit(Classifier(), precision="16-mixed")


@scenario()
def precision_16_mixed_with_scaler(run: Run) -> Outcome:
    """Lightning turns "16-mixed" on the CPU into "bf16-mixed"; a plugin given by hand keeps float16 and its scaler."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    return run.fit(models.WithInfinities(), plugins=[plugin])


@scenario((1, 2))
def precision_64_true(run: Run) -> Outcome:
    return run.fit(Classifier(), precision="64-true")


# DDP over gloo adds in bfloat16; ours adds in float32 and rounds once.
@scenario(exact=False)
def precision_bf16_true(run: Run) -> Outcome:
    return run.fit(Classifier(), precision="bf16-true")


@scenario(ALL)
def two_optimizers_by_hand(run: Run) -> Outcome:
    return run.fit(models.Adversarial(), ddp={"find_unused_parameters": True})


# DDP also averages what a frozen network has accumulated so far, and rounds once more.
@scenario(exact=False)
def toggle_model_sync_grad(run: Run) -> Outcome:
    return run.fit(models.Adversarial(accumulate=True), ddp={"find_unused_parameters": True})


@scenario((1, 2))
def unused_parameters(run: Run) -> Outcome:
    return run.fit(models.WithUnusedParameters(), ddp={"find_unused_parameters": True})


@scenario((1, 2))
def buffers(run: Run) -> Outcome:
    """Buffers are rank 0's, in training, validation and afterwards."""
    outcome: Outcome = {}
    for network in (models.WithBatchNorm, models.WithCodeBook):
        found = run.fit(network())
        if run.rank > 0 and run.kind == "ddp":
            # DDP leaves the last step's on each rank; ours ends with rank 0's everywhere.
            found = {name: value for name, value in found.items() if "running" not in name and "center" not in name}
        outcome |= {f"{network.__name__}.{name}": value for name, value in found.items()}
    return outcome


@scenario(same_as_ddp=False)
def sync_batchnorm(run: Run) -> Outcome:
    """Equal to one process on the concatenated batch; DDP rejects this on the CPU."""
    outcome: Outcome = {}
    for network in (models.WithBatchNorm, models.WithConvolution):
        torch.manual_seed(3)
        model, reference = network(), network()
        reference.load_state_dict(model.state_dict())
        trainer = run.trainer(sync_batchnorm=True)
        trainer.fit(model, dealt(run.rank, run.size))
        single = run.trainer(strategy=SingleDeviceStrategy("cpu"), devices=1)
        single.fit(reference, loader(batch_size=4 * run.size))
        expected = weights(reference)
        outcome |= {f"{network.__name__}.{name}": value for name, value in weights(model).items()}
        outcome |= {f"{network.__name__}.{name}.expected": value for name, value in expected.items()}
        outcome[f"{network.__name__}.layers"] = [type(module).__name__ for module in model.net]
        outcome[f"{network.__name__}.layers.expected"] = [type(module).__name__ for module in reference.net]
    return outcome


@scenario((1, 2), slow=True)
def compiled_whole(run: Run) -> Outcome:
    model = models.Silent()
    run.trainer(max_epochs=1).fit(torch.compile(model, backend="aot_eager"), loader(), loader(24))
    return weights(model)


@scenario(slow=True)
def compiled_regions(run: Run) -> Outcome:
    model = Classifier()
    model.net = torch.compile(model.net, backend="aot_eager")
    return run.fit(model, max_epochs=1)


@scenario(ALL, same_as_ddp=False)
def logged_means(run: Run) -> Outcome:
    """Weighted by batch size, over batches of 3 and a last one of less, integers included."""
    model, trainer = models.WithLogs(), run.trainer()
    samples = 3 * run.size + 2 * run.size
    trainer.validate(model, loader(samples, batch_size=3), verbose=False)
    index = torch.arange(samples).float()
    # Rank r sees r, r + size, ...: in batches of 3 and 2.
    parts = [part for rank in range(run.size) for part in index[rank :: run.size].split(3)]
    expected = {
        "mean": index.mean(),
        "integers": sum(part.sum() * len(part) for part in parts) / samples,
        # Lightning keeps the smallest, largest and total of each rank and reduces those.
        "min": index.min(),
        "max": index.max(),
        "sum": index.sum(),
    }
    outcome = metrics(trainer)
    return outcome | {f"metric.{name}.expected": value for name, value in expected.items()}


@scenario((1, 2))
def torchmetrics(run: Run) -> Outcome:
    return run.fit(models.WithMetrics())


@scenario((1, 2))
def evaluation_and_prediction(run: Run) -> Outcome:
    model, trainer = models.WithMetrics(), run.trainer()
    outcome: Outcome = {}
    for name, method in (("validate", trainer.validate), ("test", trainer.test)):
        outcome[name] = sorted(method(model, loader(24), verbose=False)[0].items())
    predictions = trainer.predict(model, loader(24))
    assert predictions is not None
    outcome["own_predictions"] = torch.cat(predictions)
    return outcome


@scenario(ALL)
def samplers(run: Run) -> Outcome:
    """Each rank's samples, shuffled, epoch by epoch, and in every other loader."""
    seed_everything(5, workers=True, verbose=False)
    model, trainer = Classifier(), run.trainer(max_epochs=3)
    trainer.fit(model, loader(26, shuffle=True), loader(24))
    trainer.test(model, loader(24), verbose=False)
    trainer.predict(model, loader(24))
    outcome: Outcome = {f"own_{stage}": seen for stage, seen in model.seen.items()}
    del os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]
    return outcome


@scenario(slow=True)
def loader_workers(run: Run) -> Outcome:
    """Batches fetched by forked and by spawned processes; randomness in them is seeded by rank and worker."""
    seed_everything(11, workers=True, verbose=False)
    outcome: Outcome = {}
    for method in ("fork", "spawn"):
        model, trainer = Classifier(), run.trainer(max_epochs=1)
        data = loader(num_workers=1, multiprocessing_context=method, collate_fn=add_noise)
        trainer.fit(model, data)
        outcome |= {f"{method}.{name}": value for name, value in weights(model).items()}
    del os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]
    return outcome


def add_noise(samples: Any) -> Any:
    x, y, index = torch.utils.data.default_collate(samples)
    return x + torch.randn_like(x) * 0.1, y, index


@scenario()
def checkpoint_and_early_stopping(run: Run) -> Outcome:
    model = Classifier(learning_rate=2.0)
    directory = run.directory / f"{run.kind}-{run.size}-best"
    checkpoint = ModelCheckpoint(directory, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}")
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    trainer = run.trainer(max_epochs=8, enable_checkpointing=True, callbacks=[checkpoint, stopping])
    trainer.fit(model, loader(), loader(24))
    best = [Path(path).name for path in sorted(checkpoint.best_k_models)]
    assert checkpoint.best_model_score is not None
    return weights(model) | {
        "best": best,
        "score": checkpoint.best_model_score,
        "stopped": [stopping.stopped_epoch, trainer.current_epoch],
    }


@scenario((1, 2), same_as_ddp=False)
def resume_mid_training(run: Run) -> Outcome:
    """Resumed by a new trainer with a new module, from a checkpoint written inside the second or third epoch."""
    torch.manual_seed(2)
    whole, resumed = models.WithAdam(), models.WithAdam()
    directory = run.directory / f"{run.kind}-{run.size}-resume"
    checkpoint = ModelCheckpoint(directory, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer = run.trainer(max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(whole, models.Resumable(models.dataset(48), 4))
    again = run.trainer(max_epochs=3)
    file = directory / "step=8.ckpt"
    again.fit(resumed, models.Resumable(models.dataset(48), 4), ckpt_path=file, weights_only=False)
    steps = {"steps": again.global_step, "steps.expected": trainer.global_step}
    return weights(resumed) | {f"{name}.expected": value for name, value in weights(whole).items()} | steps


@scenario()
def weight_averaging(run: Run) -> Outcome:
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    return run.fit(models.WithBatchNorm(), max_epochs=4, callbacks=[swa])


@scenario()
def pruning(run: Run) -> Outcome:
    return run.fit(
        Classifier(), callbacks=[ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)]
    )


class _Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)


class _Head(Classifier):
    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@scenario((1, 2), same_as_ddp=False)
def finetuning(run: Run) -> Outcome:
    """Layers unfrozen while training. DDP misses them, so one process on the concatenated batch is the reference."""
    model, reference = _Head(), _Head()
    reference.load_state_dict(model.state_dict())
    run.trainer(max_epochs=3, callbacks=[_Unfreeze()]).fit(model, dealt(run.rank, run.size))
    single = run.trainer(max_epochs=3, callbacks=[_Unfreeze()], strategy=SingleDeviceStrategy("cpu"), devices=1)
    single.fit(reference, loader(batch_size=4 * run.size))
    return weights(model) | {f"{name}.expected": value for name, value in weights(reference).items()}


@scenario()
def gathered_gradients(run: Run) -> Outcome:
    return run.fit(models.WithGather())


@scenario(same_as_ddp=False)
def sparse_embedding(run: Run) -> Outcome:
    """Equal to one process on the concatenated batch, which DDP over gloo (torch 2.13) is not for such a model."""
    model, reference = models.WithEmbedding(), models.WithEmbedding()
    reference.load_state_dict(model.state_dict())
    run.trainer().fit(model, dealt(run.rank, run.size))
    single = run.trainer(strategy=SingleDeviceStrategy("cpu"), devices=1)
    single.fit(reference, loader(batch_size=4 * run.size))
    return weights(model) | {f"{name}.expected": value for name, value in weights(reference).items()}


def half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))


@contextlib.contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """The warnings of this package's logger on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ring_plugins").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ring_plugins").removeHandler(handler)


def compared(
    run: Run, name: str, model: LightningModule, reference: LightningModule, ring: Any = None, **kwargs: Any
) -> Outcome:
    """Weights after a few steps, and those of one process on the concatenated batch."""
    reference.load_state_dict(model.state_dict())
    options: Any = {"max_epochs": 1, "precision": "64-true", **kwargs}
    trainer = run.trainer(**{**options, **(ring or {})})
    trainer.fit(model, dealt(run.rank, run.size))
    options["plugins"] = copy.deepcopy(options.get("plugins"))
    options |= {"strategy": SingleDeviceStrategy("cpu"), "devices": 1}
    single = run.trainer(**options)
    single.fit(reference, loader(batch_size=4 * run.size))
    found = weights(model) | {f"{key}.expected": value for key, value in weights(reference).items()}
    found |= {"steps": trainer.global_step, "steps.expected": single.global_step}
    return {f"{name}.{key}": value for key, value in found.items()}


@scenario(ALL, same_as_ddp=False)
def steps_that_one_rank_cannot_compute(run: Run) -> Outcome:
    """All ranks skip them, also with all batches that such a step accumulates; no GradScaler sees them."""
    outcome: Outcome = {}
    for where in ("forward", "backward"):
        for name, failing, skipped, options in (
            ("plain", (1, 2), (1, 2), {"gradient_clip_val": 0.1}),
            ("first of two", (2,), (2, 3), {"accumulate_grad_batches": 2}),
            ("second of two", (1,), (0, 1), {"accumulate_grad_batches": 2}),
            ("scaler", (0, 2), (0, 2), {"precision": None, "plugins": [half_precision()]}),
        ):
            if run.size == 3 and name != "plain":
                continue
            torch.manual_seed(4)
            model, reference = models.RunsOutOfMemory(where, failing), models.RunsOutOfMemory(skipped=skipped)
            options["limit_train_batches"] = 4
            ring = {"strategy": RingStrategy(skip_step_on=(KeyError, MemoryError))}
            with warnings_of_ours() as lines:
                outcome |= compared(run, f"{where}, {name}", model, reference, ring, **options)
            skips = [line for line in lines if f"rank {run.size - 1}: MemoryError: no room" in line or run.size == 1]
            outcome[f"own_{where}, {name}.lines"] = len(skips)
            steps = len({index // options.get("accumulate_grad_batches", 1) for index in skipped})
            is_told = run.rank in (0, run.size - 1)
            outcome[f"own_{where}, {name}.lines.expected"] = steps if is_told else 0
    return outcome


@scenario((2, 3), same_as_ddp=False)
def line_search(run: Run) -> Outcome:
    """LBFGS takes the steps of one process on the concatenated batch, by Lightning and by hand."""
    outcome: Outcome = {}
    for by_hand in (False, True):
        torch.manual_seed(4)
        model, reference = models.WithLineSearch(by_hand), models.WithLineSearch(by_hand)
        name = "by hand" if by_hand else "automatic"
        outcome |= compared(run, name, model, reference)
        outcome |= {f"{name}.count": model.evaluations, f"{name}.count.expected": reference.evaluations}
    return outcome


@scenario(same_as_ddp=False)
def copies_of_a_module_in_training(run: Run) -> Outcome:
    """A copy has the weights and trains alone; the module goes on as if nothing had happened."""

    class Copies(Callback):
        copies: ClassVar[list[LightningModule]] = []

        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            buffer = io.BytesIO()
            torch.save(module, buffer)
            buffer.seek(0)
            self.copies[:] = [copy.deepcopy(module), torch.load(buffer, weights_only=False)]

    model, reference = Classifier(), Classifier()
    copies = Copies()
    outcome = compared(run, "copied", model, reference, callbacks=[copies])
    for number, one in enumerate(copies.copies):
        one.net(torch.ones(2, models.FEATURES, dtype=torch.float64) * (run.rank + 1)).sum().backward()
        gradient = one.net[2].weight.grad
        assert gradient is not None
        outcome[f"own_{number}"] = gradient.clone()
        alone = Classifier().double()
        alone.load_state_dict(one.state_dict())
        alone.net(torch.ones(2, models.FEATURES, dtype=torch.float64) * (run.rank + 1)).sum().backward()
        outcome[f"own_{number}.expected"] = alone.net[2].weight.grad
        one.zero_grad()
    return outcome


@scenario((1, 2))
def several_trainers_in_one_process(run: Run) -> Outcome:
    """Fit twice with one trainer, test with it, and train on with another."""
    model, trainer = Classifier(), run.trainer(max_epochs=1)
    trainer.fit(model, loader(), loader(24))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(), loader(24))
    tested = trainer.test(model, loader(24), verbose=False)
    second = run.trainer(max_epochs=1)
    second.fit(model, loader())
    return weights(model) | {"tested": sorted(tested[0].items()), "steps": [trainer.global_step, second.global_step]}


@scenario(ALL, same_as_ddp=False)
def different_start_on_each_rank(run: Run) -> Outcome:
    """Weights are rank 0's from the first step on, also where no seed was set."""
    torch.manual_seed(run.rank)
    model = Classifier()
    trainer = run.trainer(max_epochs=1, limit_train_batches=0)
    trainer.validate(model, loader(24), verbose=False)
    torch.manual_seed(0)
    return weights(model) | {f"{name}.expected": value for name, value in weights(Classifier()).items()}


@scenario((2, 3), same_as_ddp=False)
def learning_rates_are_compared(run: Run) -> Outcome:
    """Those of the optimizers that the strategy has by the first backward; see tests/torch/test_compared_options.py."""
    outcome: Outcome = {"groups.expected": 1}

    class Asking(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            outcome["groups"] = len(self.trainer.strategy._averager.checks.options.texts)

    run.trainer(max_epochs=1, limit_train_batches=1).fit(Asking(), loader())
    return outcome


@scenario(ALL, same_as_ddp=False)
def strategy_collectives(run: Run) -> Outcome:
    """The collectives that a module can call on ``trainer.strategy``."""
    outcome: Outcome = {}

    class Asking(Classifier):
        def on_fit_start(self) -> None:
            strategy, rank, size = self.trainer.strategy, run.rank, run.size
            total = size * (size - 1) / 2
            outcome["integer_mean"] = float(strategy.reduce(torch.tensor(rank), reduce_op="mean"))
            outcome["integer_mean.expected"] = total / size
            outcome["sum"] = strategy.reduce(torch.tensor([float(rank)]), reduce_op="sum")
            outcome["sum.expected"] = torch.tensor([total])
            outcome["no_tensor"] = strategy.reduce("text")
            outcome["decisions"] = [
                strategy.reduce_boolean_decision(rank == 0),
                strategy.reduce_boolean_decision(rank == 0, all=False),
            ]
            outcome["decisions.expected"] = [size == 1, True]
            outcome["broadcast"] = strategy.broadcast({"from": rank}, src=size - 1)["from"]
            outcome["broadcast.expected"] = size - 1
            gathered = self.all_gather({"rank": torch.tensor([rank])})["rank"]
            outcome["gathered"] = gathered.tolist()
            outcome["gathered.expected"] = [rank] if size == 1 else [[other] for other in range(size)]
            own = torch.full((2, rank + 1), float(rank), requires_grad=True)
            parts = self.all_gather(own, sync_grads=True) if size > 1 else [own]
            outcome["unequal"] = [part.tolist() for part in parts]
            outcome["unequal.expected"] = [[[float(other)] * (other + 1)] * 2 for other in range(size)]
            sum((1 + number) * part.sum() for number, part in enumerate(parts)).backward()
            assert own.grad is not None
            outcome["gradients"] = [(own.grad / (1 + rank)).min().item(), (own.grad / (1 + rank)).max().item()]
            outcome["gradients.expected"] = [float(size)] * 2
            lists = self.all_gather(list(own.detach()[:1])) if size > 1 else [[own[0]]]
            outcome["collection"] = [part.tolist() for part in lists[0]]
            outcome["collection.expected"] = [[float(other)] * (other + 1) for other in range(size)]
            strategy.barrier("here")

    trainer = run.trainer(max_epochs=1, limit_train_batches=1)
    trainer.fit(Asking(), loader())
    return outcome
