"""Models by their names on the hub: found, fetched into huggingface_hub's cache, and checked. Only a start fetches."""
