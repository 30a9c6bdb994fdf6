"""How gradients change parameters."""
