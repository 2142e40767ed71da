"""Whole decode steps with all Triton kernels, in the interpreter."""

import interpreter


def test_in_the_interpreter():
    interpreter.run("forward")
