"""KV pages beyond the device: the host's copies, the tiers below it, peers, and the transfers between them."""
