"""How a model is cut over ranks."""
