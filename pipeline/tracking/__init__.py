"""What is remembered: the tracker protocol, the MLflow tracker, the run report."""
