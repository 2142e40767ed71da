"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings. Knows no engine and no HTTP."""
