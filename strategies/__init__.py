"""What the server decides and learns."""
