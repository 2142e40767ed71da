"""Tiers below the host tier: their interface, the thread that calls them, a disk, Redis, plug-ins. No torch here."""
