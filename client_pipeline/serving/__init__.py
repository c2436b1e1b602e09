"""Answers of a language model whose parts are apart: keys and values stay with the TEBs."""
