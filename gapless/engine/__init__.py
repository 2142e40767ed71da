"""The public Python API, and the boundary between the process that talks and the process that computes."""
