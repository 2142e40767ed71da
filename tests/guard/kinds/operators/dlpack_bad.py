"""Frames that another library hands over by dlpack are written in place, while a side stream still reads them."""

import torch


class Frame:
    """Stands for another library's array on the device."""

    def __init__(self) -> None:
        self._memory = torch.zeros(3, 16, 16, device="cuda")

    def __dlpack__(self, **options: object) -> object:
        return self._memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple:
        return self._memory.__dlpack_device__()


class Reader(torch.cuda.Stream):
    """A stream with a name, made as torch makes its own."""

    def __new__(cls, name: str) -> "Reader":
        made = super().__new__(cls, priority=-1)
        made.name = name
        return made

    def __init__(self, name: str) -> None:
        assert self.name == name


frame, reader = Frame(), Reader("encode")
mine, theirs = torch.from_dlpack(frame), torch.from_dlpack(frame)
assert mine.is_cuda and theirs.device == torch.device("cuda:0")
for number in range(3):
    mine.fill_(number)  # finds: race
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        encoded = theirs.half().flatten()
