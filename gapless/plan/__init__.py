"""Decisions about the next step: plain Python over integers. No torch, no token values."""
