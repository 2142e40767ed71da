"""The Triton attention kernels without a GPU, in a process of their own."""

from interpreter import run


def test_kernels_pass_their_tests_in_the_interpreter():
    run("attention")
