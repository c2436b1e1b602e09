"""What is learned: text of a task, its tokenizer, its batches and its metrics. One module per task."""
