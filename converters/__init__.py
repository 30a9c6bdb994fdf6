"""Foreign checkpoints to Flax parameters and back: readers, reversible rules, parity."""
