"""Flax NNX model families: the one definition used by parity, export and serving."""
