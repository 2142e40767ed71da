"""The device side of a step: packet, inputs, outbox, and the program that runs them in order."""
