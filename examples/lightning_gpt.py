"""Train a small GPT on the source code of Python's standard library with Lightning, resume it, and let it write.

    python examples/lightning_gpt.py                          # two processes, one or two minutes on two cores
    python examples/lightning_gpt.py --steps 2000             # resumes from gpt.ckpt, and goes on to step 2,000
    mpirun -n 8 --hostfile hosts python examples/lightning_gpt.py --steps 20000

The model reads bytes, so there is no tokenizer. gpt.ckpt is written every 100 steps and at the end. With several
hosts, it must be on shared storage.
"""

import argparse
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ring_plugins.lightning import RingStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=2, help="processes, unless a launcher has started them already")
parser.add_argument("--steps", type=int, default=500, help="in all, over resumed runs")
parser.add_argument("--checkpoint", type=Path, default=Path("gpt.ckpt"), help="a file whose name ends with .ckpt")
parser.add_argument("--files", type=int, default=150, help="modules of the standard library to learn from")
arguments = parser.parse_args()

context = 64  # bytes that the model looks back
batch_size = 16  # per rank
width, heads, depth = 128, 4, 2
learning_rate = 1e-3  # at two ranks; Adam tolerates a rate that does not grow with the batch
# A deprecation warning of torch for Lightning 2.6, which a script cannot avoid.
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


class Sources(Dataset):
    """Windows of `context` bytes, and the same shifted by one."""

    def __init__(self, files: int) -> None:
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]
        self.bytes = torch.frombuffer(
            bytearray(b"\n".join(module.read_bytes() for module in modules)), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[index * context : (index + 1) * context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalize_1, self.normalize_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.normalize_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).flatten(-2))
        return x + self.think(self.normalize_2(x))


class GPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]]))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)

    @torch.no_grad()
    def write(self, start: str, length: int) -> str:
        text = torch.tensor([list(start.encode())])
        for _ in range(length):
            likely = torch.softmax(self(text[:, -context:])[:, -1] / 0.8, dim=-1)
            text = torch.cat([text, torch.multinomial(likely, 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


L.seed_everything(1, verbose=False)
model = GPT()
loader = DataLoader(Sources(arguments.files), batch_size, shuffle=True, drop_last=True)
checkpoints = L.pytorch.callbacks.ModelCheckpoint(
    arguments.checkpoint.parent, arguments.checkpoint.stem, every_n_train_steps=100, enable_version_counter=False
)
trainer = L.Trainer(
    strategy=RingStrategy(),
    accelerator="cpu",
    devices=arguments.devices,
    max_steps=arguments.steps,
    gradient_clip_val=1.0,
    callbacks=[checkpoints],
    logger=False,
    enable_model_summary=False,
    log_every_n_steps=10,
)
resumed = arguments.checkpoint if arguments.checkpoint.exists() else None
trainer.fit(model, loader, ckpt_path=resumed)
loss = trainer.callback_metrics.get("loss")
trainer.save_checkpoint(arguments.checkpoint)  # the last step; all ranks call it, rank 0 writes

if trainer.is_global_zero:
    print(
        f"ranks {trainer.world_size}, step {trainer.global_step}, resumed {resumed is not None}, loss {loss or 0:.2f}"
    )
    print(model.eval().cpu().write("def ", 200))
