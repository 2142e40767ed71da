"""Fused operations: each a plain torch twin that says what it means, and Triton kernels for CUDA beside it."""
