"""Forms of output: a request's form becomes a matcher of the allowed next tokens. No torch."""
