"""An LSTM is trained on packed sequences, whose lengths stay on the host."""

import torch
from torch.nn.utils import rnn

SIZE = 8


def main() -> None:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(SIZE, SIZE, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    lengths, target = torch.tensor([5, 3, 2]), torch.ones(SIZE, device="cuda")
    loss = torch.zeros((), device="cuda")
    for _ in range(3):
        batch = torch.randn(5, 3, SIZE, device="cuda")
        packed = rnn.pack_padded_sequence(batch, lengths)
        assert packed.data.is_cuda and not packed.batch_sizes.is_cuda
        padded, known = rnn.pad_packed_sequence(layer(packed)[0])
        assert padded.is_cuda and not known.is_cuda
        optimizer.zero_grad()
        loss = (padded[-1, 0] - target).square().sum()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        pieces = rnn.pack_sequence([torch.ones(3, SIZE, device="cuda"), torch.ones(2, SIZE, device="cuda")])
        last = rnn.unpack_sequence(layer(pieces)[0])[0]
    print("trained", loss.shape, last.shape)


main()
