"""Measuring: load generator, A/B reports, accuracy, timelines. Runs against any OpenAI-compatible server."""
