"""Dialects: the APIs that generate. Each is a file or a folder: requests, answers and errors."""
