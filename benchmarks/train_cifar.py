"""Train the small VGG of the pooling benchmark on CIFAR-10, with maximum or average pools, and write its weights.

    python benchmarks/train_cifar.py max --output benchmarks/weights
    python benchmarks/train_cifar.py avg --output benchmarks/weights

One thread and one seed: the same machine writes the same file again. All 50,000 training images, shifted and
mirrored at random; the last epoch is kept, whatever its test accuracy, so the test images stay held out. Weights are
written as float16, and the accuracy that is written beside them is that of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save as serialize
from torch import Tensor, nn

import networks
import shared_data

CACHE = shared_data.REPOSITORY / "build" / "weights"  # not under version control
BATCH, SHIFT = 64, 2


def shuffled(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in torch.randperm(len(x)).split(BATCH):
        yield jitter(x[rows]), y[rows]


def jitter(x: Tensor) -> Tensor:
    """Shift each image by at most `SHIFT` pixels in each direction, and mirror every second one."""
    size, n = x.shape[-1], len(x)
    rows, columns = torch.randint(2 * SHIFT + 1, (2, n, 1)) + torch.arange(size)  # (B, 32) each
    columns = torch.where(torch.rand(n, 1) < 0.5, columns, columns.flip(1))
    image = torch.arange(n)[:, None, None]
    padded = F.pad(x, (SHIFT,) * 4)
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # channels last in memory


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> None:
    steps = epochs * math.ceil(len(x) / BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        start, total = time.process_time(), 0.0
        for batch, labels in shuffled(x, y):
            loss = F.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
        seconds = time.process_time() - start
        print(f"epoch {epoch + 1}: mean loss {total / len(x):.3f}, {seconds:.0f} s of processor time", flush=True)


def save(model: nn.Module, path: Path) -> None:
    """Write beside the target and rename, so that no half-written file is ever in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {key: w.half() if w.is_floating_point() else w for key, w in model.state_dict().items()}
    partial.write_bytes(serialize({key: w.contiguous() for key, w in state.items()}))
    os.replace(partial, path)


@torch.inference_mode()
def measure(name: str, path: Path) -> dict[str, object]:
    """The accuracy of the network in the file on all test images there are."""
    model = networks.load(name, load_file(path))
    x, y = shared_data.images("cifar10", "test", None, normalisation=name)
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(250), y.split(250), strict=True))
    accuracy, n = right / len(x), len(x)
    return {"test images": n, "accuracy": accuracy, "standard error": math.sqrt(accuracy * (1 - accuracy) / n)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", choices=("max", "avg"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=CACHE, help="the folder for weights and facts")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    name = f"vgg6{options.pool}_cifar10"
    x, y = shared_data.images("cifar10", "train", None, normalisation=name)
    model = networks.NETWORKS[name].build().to(memory_format=torch.channels_last)
    start = time.process_time()
    train(model, x.contiguous(memory_format=torch.channels_last), y, options.epochs, options.lr)
    path = options.output / f"{name}.safetensors"
    save(model, path)
    facts = {
        "command": f"python benchmarks/train_cifar.py {options.pool}",
        "seed": options.seed,
        "epochs": options.epochs,
        "lr": options.lr,
        "training images": len(x),
        "minutes of processor time": round((time.process_time() - start) / 60, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **measure(name, path),
    }
    path.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
