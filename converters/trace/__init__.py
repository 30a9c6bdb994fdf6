"""Any torch module that `torch.export` accepts becomes a program that runs in JAX."""
