"""Whole decode steps with all Triton kernels, in the interpreter."""

import interpreter


def test_kernels_pass_their_tests_in_the_interpreter():
    interpreter.run("forward")
