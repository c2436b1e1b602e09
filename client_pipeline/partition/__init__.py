"""Cutting a Transformer into embedding, encoder blocks (TEBs) and decoder or head, and joining it again."""
