"""Fused operations: each as plain torch, as Triton for CUDA, and as C++ for the CPU. Model and step call them alone."""
