"""The Triton attention kernels without a GPU, in a process of their own."""

from interpreter import run


def test_in_the_interpreter():
    run("attention")
