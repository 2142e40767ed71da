"""A hook scales gradients on a side stream; the stream that reduces them waits for the main stream alone."""

import torch
from torch import Tensor, nn

scaling, reducing = torch.cuda.Stream(), torch.cuda.Stream()
model = nn.Linear(4, 4).to("cuda")  # san: ok(set-up)
buckets = [torch.zeros_like(parameter) for parameter in model.parameters()]


def scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    scaling.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(scaling):
        parameter.grad.mul_(0.5)


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(scale)

model(torch.ones(2, 4, device="cuda")).sum().backward()
reducing.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(reducing):
    for bucket, parameter in zip(buckets, model.parameters(), strict=True):
        bucket.add_(parameter.grad)  # finds: race
torch.cuda.current_stream().wait_stream(reducing)
