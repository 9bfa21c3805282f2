"""One rank of a training with PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import hashlib

import measuring
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
RATE = 0.01
CLASSES = 10


def cnn() -> nn.Module:
    """The CNN of train_tensorflow."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 200), nn.ReLU(), nn.Linear(200, CLASSES)),
    )


def mlp() -> nn.Module:
    """The MLP of train_tensorflow."""
    return nn.Sequential(
        *(nn.Linear(784, 4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, CLASSES),
    )


MODELS = {"cnn": (cnn, (1, 28, 28)), "mlp": (mlp, (784,))}


def main() -> None:
    """Measures."""
    task = measuring.task()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds, weights = {}, {}
    for name in task["models"]:
        make, shape = MODELS[name]
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(make())
        torch.manual_seed(100 + rank)
        x = torch.rand(task["batch"], *shape)
        y = torch.randint(0, CLASSES, (task["batch"],))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        loss_of = nn.CrossEntropyLoss()

        def step(model=model, optimizer=optimizer, loss_of=loss_of, x=x, y=y) -> float:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        measuring.repeated(step)(task["warm"])
        case = f"{name}/{task['batch']}"
        seconds[case] = measuring.repeated(step)(task["steps"])
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        weights[case] = digest.hexdigest()[:16]
    measuring.leave(
        task, rank, size, {"torch": torch.__version__}, seconds, weights=weights
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
