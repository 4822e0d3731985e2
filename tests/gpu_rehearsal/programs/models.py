"""Small models of the usual kinds, whose batches are the same numbers on every device."""

import torch
from torch import nn


class Attention(nn.Module):
    """Softmax attention in plain products, one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.triu(torch.ones_like(scores[0], dtype=torch.bool), 1)
        return self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    """Predicts the next of 32 tokens."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.blocks(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200), nn.GELU(), nn.Linear(200, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}


def make(name: str) -> nn.Module:
    """A model whose weights are the same wherever it is made."""
    torch.manual_seed(1)
    return MODELS[name]()


def batch(name: str, step: int, rank: int = 0, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name == "transformer":
        tokens = torch.randint(32, (size, 13), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 20) if name == "mlp" else (size, 1, 12, 12)
    return torch.randn(shape, generator=generator), torch.randint(5, (size,), generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


def flat(model: nn.Module) -> torch.Tensor:
    """All weights, and the statistics of batch normalization, on the CPU."""
    return torch.cat([value.detach().double().flatten().cpu() for value in model.state_dict().values()])
