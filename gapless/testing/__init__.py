"""Test doubles, for tests of the engine and of what is built around it. No other room imports this one.

`testing.core` has FakeCore, a core without a model; `testing.worker` is the engine's process with that core in it
(`ProcessBackend(worker=("gapless.testing.worker", ...))`); `testing.checksum` has ChecksumModel, whose tokens prove
which memory a step has read. Each is imported by its own name, so that a worker starts without torch.
"""
