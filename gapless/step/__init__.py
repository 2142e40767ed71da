"""The device side of a step: tables, packet, inputs, sampler, outbox, and the program that runs them in order."""
