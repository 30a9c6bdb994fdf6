"""What a process takes of its accelerator, and how a model is laid out on it."""
