"""timm's PrefetchLoader: a side stream uploads and normalises the next batch while the model trains on this one."""

import sys

import torch

for name in ("nms", "qnms"):  # torchvision's own library does not load beside a torch without CUDA
    torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
from timm.data.loader import PrefetchLoader  # noqa: E402
from torch import nn  # noqa: E402

uses_autocast = "autocast" in sys.argv
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).cuda()
data = [(torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8), torch.zeros(2, dtype=torch.long)) for _ in range(6)]
batches = [(images.pin_memory(), labels.pin_memory()) for images, labels in data]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for images, labels in PrefetchLoader(batches, device=torch.device("cuda")):
    with torch.autocast("cuda", torch.bfloat16, enabled=uses_autocast):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
