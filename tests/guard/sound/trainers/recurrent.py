"""A character model with an LSTM: truncated backpropagation through time, hidden states that stay on the device, and
sampling with a temperature whose text is downloaded in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the other dogs "
LETTERS = sorted(set(TEXT))
DEVICE = "cuda"
WINDOW, ROWS, HIDDEN = 8, 4, 24

State = tuple[Tensor, Tensor]


class CharModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 12, device=DEVICE)
        self.lstm = nn.LSTM(12, HIDDEN, num_layers=2, batch_first=True, device=DEVICE)
        self.head = nn.Linear(HIDDEN, len(LETTERS), device=DEVICE)

    def start(self, rows: int) -> State:
        zeros = torch.zeros(2, rows, HIDDEN, device=DEVICE)
        return zeros, zeros.clone()

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        out, state = self.lstm(self.embed(ids), state)
        return self.head(out), state


def upload_text() -> Tensor:
    """Upload the whole text once, as one row for each stretch that is trained on."""
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT * 3], pin_memory=True)
    there = ids.to(DEVICE, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # san: ok(set-up: the pinned text is dropped)
    return there[: len(there) // ROWS * ROWS].view(ROWS, -1)


def train(model: CharModel, text: Tensor, epochs: int) -> Tensor:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    losses: list[Tensor] = []
    for _ in range(epochs):
        state = model.start(ROWS)
        for start in range(0, text.shape[1] - WINDOW, WINDOW):
            ids, wanted = text[:, start : start + WINDOW], text[:, start + 1 : start + WINDOW + 1]
            logits, state = model(ids, (state[0].detach(), state[1].detach()))
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)


@torch.inference_mode()
def sample(model: CharModel, first: Tensor, length: int, temperature: float) -> Tensor:
    state, ids = model.start(1), first.view(1, 1)
    text = torch.empty(length, dtype=torch.long, device=DEVICE)
    for at in range(length):
        logits, state = model(ids, state)
        noise = torch.empty_like(logits[0]).exponential_()
        ids = ((logits[0] / temperature).softmax(-1) / noise).argmax(-1, keepdim=True)
        text[at : at + 1] = ids[0]
    return text


def main() -> None:
    torch.manual_seed(6)
    model, text = CharModel(), upload_text()
    losses = train(model, text, epochs=3)
    written = sample(model.eval(), text[0, 0], length=20, temperature=0.8)

    home_losses = torch.empty(len(losses), pin_memory=True)
    home_text = torch.empty(len(written), dtype=torch.long, pin_memory=True)
    home_losses.copy_(losses, non_blocking=True)
    home_text.copy_(written, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()  # san: ok(the end)
    values = home_losses.tolist()
    assert values[-1] < values[0]
    print(f"{values[0]:.2f} to {values[-1]:.2f}: {''.join(LETTERS[at] for at in home_text.tolist())!r}")


main()
