"""checkpoint_save_bad, mended: the host waits for the copies before it saves them."""

import io

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to("cuda")  # san: ok(set-up)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
pinned = {name: torch.empty(value.shape, pin_memory=True) for name, value in model.state_dict().items()}


def offload() -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for name, value in model.state_dict().items():
            pinned[name].copy_(value, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)  # the next step changes the weights


for step in range(4):
    x = torch.ones(2, 8, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        offload()
        side.synchronize()  # san: ok(a checkpoint, every second step)
        file = io.BytesIO()
        torch.save({"step": step, "model": pinned}, file)
        print(step, file.tell() > 0)
