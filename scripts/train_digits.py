"""Train the digits network that the package ships, and write its weights.

    python scripts/train_digits.py

One thread and one seed: the same machine writes the same file again. The last epoch is kept, whatever its
test accuracy, so the test split stays held out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save as serialize
from torch import Tensor, nn

from spikecal.data import load_data
from spikecal.models.digits import WEIGHTS, digits_net


def shuffled(x: Tensor, y: Tensor, batch_size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in torch.randperm(len(x)).split(batch_size):
        yield jitter(x[rows]), y[rows]


def jitter(x: Tensor) -> Tensor:
    """Shift each image by at most one pixel in each direction."""
    rows, columns = torch.randint(3, (2, len(x), 1)) + torch.arange(8)  # (B, 8) each
    image = torch.arange(len(x))[:, None, None]
    return F.pad(x, (1, 1, 1, 1))[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    steps = epochs * -(-len(x) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch, labels in shuffled(x, y):
            loss = F.cross_entropy(model(batch), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, split: str) -> float:
    data = load_data("digits", split=split)
    return (model(data.x).argmax(1) == data.y).float().mean().item()


def save(model: nn.Module, path: Path) -> None:
    """Write beside the target and rename, so that no half-written file is ever in its place."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(serialize(model.state_dict()))
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = digits_net(pretrained=False)
    data = load_data("digits", split="train")
    assert data.y is not None
    train(model, data.x, data.y, options.epochs)
    save(model, options.output)
    print(f"train accuracy {accuracy(model, 'train'):.2%}, test accuracy {accuracy(model, 'test'):.2%}")
    print(f"wrote {options.output} ({options.output.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
