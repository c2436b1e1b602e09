"""Folders that a trained model is taken away in: of the transformers library, and of PEFT."""
