"""Generated text and labels."""
