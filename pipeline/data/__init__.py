"""Datasets as deterministic, resumable numpy batches."""
