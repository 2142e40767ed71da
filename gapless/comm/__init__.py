"""Groups of ranks: processes that compute one engine's steps together, each with its share of the layers."""
