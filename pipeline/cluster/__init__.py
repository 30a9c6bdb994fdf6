"""What the work runs on: the local head, resources, feasibility."""
