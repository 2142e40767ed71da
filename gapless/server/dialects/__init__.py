"""Dialects: the APIs that generate. Each is a folder with its requests, its answers and its errors."""
