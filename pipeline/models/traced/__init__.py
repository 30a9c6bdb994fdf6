"""Torch modules as JSON programs: read, interpreted in JAX, and wrapped as Flax NNX modules. Loads no torch."""
