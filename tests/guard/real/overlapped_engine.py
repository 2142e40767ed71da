"""A decode loop that overlaps the host with the device, as mini-sglang's does: tokens reach the host a step later.

Comments say what `gapless san` finds in each line: the one wait that such a loop is built around, and one fault, a
batch that is compacted by a mask.
"""

import torch

device = "cuda"
VOCAB, WIDTH, ROWS, DEPTH = 64, 16, 4, 2
torch.manual_seed(0)
embed, head = torch.randn(VOCAB, WIDTH, device=device), torch.randn(WIDTH, VOCAB, device=device)
last = torch.ones(ROWS, dtype=torch.long, device=device)
done = torch.zeros(ROWS, dtype=torch.bool, device=device)
home = [torch.zeros(ROWS, dtype=torch.long, pin_memory=True) for _ in range(DEPTH)]
compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
computed, copied = ([torch.cuda.Event() for _ in range(DEPTH)] for _ in range(2))
for stream in (compute, copies):
    stream.wait_stream(torch.cuda.current_stream())


def launch(step: int, drafts: torch.Tensor) -> None:
    slot = step % DEPTH
    with torch.cuda.stream(compute):
        compute.wait_event(copied[slot])
        last.copy_((embed[last] @ head).argmax(-1))
        done.logical_or_(last == 63)
        kept = drafts[~done]  # loop: mask-index
        drafts[: kept.shape[0]] = kept
        computed[slot].record()
    with torch.cuda.stream(copies):
        copies.wait_event(computed[slot])
        home[slot].copy_(last, non_blocking=True)
        copied[slot].record()
    compute.wait_event(copied[slot])


drafts = torch.zeros(ROWS, device=device)
compute.wait_stream(torch.cuda.current_stream())
answers = []
for step in range(6):
    launch(step, drafts)
    if step >= 1:
        copied[(step - 1) % DEPTH].synchronize()  # loop: event-wait
        answers.append(home[(step - 1) % DEPTH].tolist())
print(len(answers), "done")
