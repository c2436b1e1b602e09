"""Data of a task: tables, texts, conversations and hub datasets, and the clusters' shares of them."""
