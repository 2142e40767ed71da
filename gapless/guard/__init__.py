"""Detectors of hidden syncs and races, usable on any PyTorch program. Imports torch, numpy and nothing of ours."""
