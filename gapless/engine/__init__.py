"""The public Python API, and the boundary between the front process and the engine process."""
