"""Trains by accelerate, with clipped gradients and a checkpoint. Comments say what `gapless san` finds in each line."""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda"  # what Accelerator chooses
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # once: upload
total = 0.0
for x, y in loader:  # loop: upload
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()  # loop: host-read
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)  # loop: copy-to-host
print("done")
