"""The test kit: runs your own model, policy or device without a GPU, under many orders of events.

`testing.scenario` plays requests on an engine and checks it each turn; `testing.sim` has the simulated device, and
`testing.adversary` decides how its streams move; `testing.checksum` has ChecksumModel, whose tokens prove which memory
a step has read. `testing.core` has FakeCore, a core without a model, and `testing.worker` is the engine's process with
that core in it (`ProcessBackend(worker=("gapless.testing.worker", ...))`); `testing.guarded` checks that no step of any
engine waits for the device. docs/guides/testing.md shows how to use
them. No other room imports this one. Each is imported by its own name, so that a worker starts without torch.
"""
