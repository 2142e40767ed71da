"""The OpenAI-compatible HTTP server: framing, validation, auth, metrics. Generation itself is the engine's."""
