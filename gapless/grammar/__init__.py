"""Forms of output: what a request asks for becomes a matcher that says which tokens may come next. No torch."""
