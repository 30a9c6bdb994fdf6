"""What is trained: a model, its rows and its loss."""
