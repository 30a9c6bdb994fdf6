"""What moves between stages: store, commit, manifest."""
