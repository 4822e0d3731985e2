"""Accelerate and Transformers' Trainer train over the backend "ring" as in one process."""

import pytest

from tests.launch import run_ranks

pytest.importorskip("accelerate")

TRAIN = """
import os
import torch
import ring_plugins.torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.utils.data import DataLoader, TensorDataset
from tests.worker import report

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="ring")])
torch.manual_seed(0)
data = torch.randn(16, 4)
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for inputs, targets in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
report("backend", torch.distributed.get_backend())
report("place", [accelerator.process_index, accelerator.num_processes])
report("gathered", accelerator.gather(torch.tensor([accelerator.process_index])).tolist())
report("weights", [p.detach().flatten().tolist() for p in model.parameters()])
accelerator.end_training()
"""

TRAINER = """
import os
import torch
import ring_plugins.torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from tests.worker import report

set_seed(0)
sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
texts = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    os.environ["TEST_ROOT"], ddp_backend="ring", use_cpu=True, max_steps=4, report_to=[], save_strategy="no",
    per_device_train_batch_size=8 // int(os.environ["TEST_RANKS"]), learning_rate=0.01, disable_tqdm=True,
    optim="sgd", lr_scheduler_type="constant",
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
report("place", [arguments.process_index, arguments.world_size])
report("loss", trainer.evaluate()["eval_loss"])
report("weights", [p.detach().flatten().tolist() for p in model.parameters()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_accelerate(launcher):
    result, alone = run_ranks(TRAIN, 2, launcher, timeout=120), run_ranks(TRAIN, 1, "exported", timeout=120)
    assert result.values("backend") == ["ring"] * 2 and result.values("gathered") == [[0, 1]] * 2
    assert sorted(result.values("place")) == [[0, 2], [1, 2]] and alone.values("place") == [[0, 1]]
    first, second = result.values("weights")
    assert first == second
    for ours, theirs in zip(first, alone.values("weights")[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    env = {"TEST_ROOT": str(tmp_path), "HIDDEN_PACKAGES": "", "HF_HUB_OFFLINE": "1"}
    result, alone = (run_ranks(TRAINER, ranks, "mpirun", env=env, timeout=180) for ranks in (2, 1))
    assert sorted(result.values("place")) == [[0, 2], [1, 2]]
    first, second = result.values("weights")
    assert first == second
    for ours, theirs in zip(first, alone.values("weights")[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert result.values("loss")[0] == pytest.approx(alone.values("loss")[0], abs=1e-5)
