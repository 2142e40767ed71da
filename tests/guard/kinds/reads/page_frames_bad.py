"""KV pages go to another host over a socket: the frame is sent before its page has come from the device."""

import socket
import struct
import threading

import torch

PAGE = 64
pages = torch.arange(4 * PAGE, dtype=torch.float32, device="cuda").view(4, PAGE)
staging = torch.zeros(2, PAGE, pin_memory=True)
frames = staging.numpy()
done = [torch.cuda.Event() for _ in range(2)]


def receive(other: socket.socket, got: list[int]) -> None:
    while head := other.recv(8, socket.MSG_WAITALL):
        page, size = struct.unpack("!II", head)
        got.append(page if len(other.recv(size, socket.MSG_WAITALL)) == size else -1)


one, other = socket.socketpair()
got: list[int] = []
receiver = threading.Thread(target=receive, args=(other, got))
receiver.start()
for page in (2, 0, 3):
    slot = page % 2
    staging[slot].copy_(pages[page], non_blocking=True)
    done[slot].record()
    frame = frames[slot]
    one.sendall(struct.pack("!II", page, frame.nbytes))
    one.sendall(frame)  # finds: race
one.close()
receiver.join()
other.close()
print(got)
