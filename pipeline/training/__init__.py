"""Torch only; knows nothing of Ray (but for the files named ray_*) or MLflow."""
