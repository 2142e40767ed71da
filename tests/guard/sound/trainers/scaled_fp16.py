"""float16 training with loss scaling, twice: a plain optimizer, for which the scaler must read once a step whether any
gradient overflowed, and a fused one, which is given the answer on the device.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda"
STEPS, BATCH, WIDTH = 5, 16, 12


def build(fused):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, 24, device=device),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(24, 1, device=device),
    )
    if fused:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return model, optimizer, torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)


def batch(step):
    generator = torch.Generator(device).manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, device=device)
    return x, x.sum(dim=1, keepdim=True).tanh()


def loss_of(model, x, y):
    with torch.autocast(device, dtype=torch.float16):
        out = model(x)
    # The loss itself is computed in float32.
    return F.smooth_l1_loss(out.float(), y)


def train_plain():
    model, optimizer, scaler = build(fused=False)
    losses = torch.zeros(STEPS, device=device)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)  # san: ok(whether to skip the step is decided on the host, once a step)
        scaler.update()
        losses[step : step + 1] = loss.detach()
    return losses


def train_fused():
    model, optimizer, scaler = build(fused=True)
    losses = torch.zeros(STEPS, device=device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        losses[step : step + 1] = loss.detach()
    return losses


def main():
    plain = train_plain()
    fused = train_fused()
    both = torch.stack([plain, fused])
    # One download for everything, when both runs are over.
    rows = both.tolist()  # san: ok(the end)
    for name, row in zip(("plain", "fused"), rows, strict=True):
        assert all(value == value for value in row), "no step gave NaN"
        print(name, " ".join(f"{value:.3f}" for value in row))


main()
