"""Products of rows with weights that were laid out for them beforehand, on a CPU."""
