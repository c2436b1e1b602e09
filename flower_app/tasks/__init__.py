"""Tasks: text, tokenizer, batches and metrics. One module per task."""
