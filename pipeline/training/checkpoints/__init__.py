"""Checkpoints that exist only when they are whole."""
