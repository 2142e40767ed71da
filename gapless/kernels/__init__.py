"""Fused operations: each in plain torch, in Triton for CUDA, and in C++ for the CPU. Called by model and step alone."""
