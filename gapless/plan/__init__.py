"""Deciding what the next step does: plain Python over integers. No torch, no token values."""
