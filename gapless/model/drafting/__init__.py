"""Drafters, one file each: on the device they write tokens that a step may verify."""
