"""Tiny models, a tokenizer and a server: all that the demo and the tests need to run anywhere."""
