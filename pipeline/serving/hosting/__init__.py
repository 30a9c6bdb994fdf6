"""From model directories to models that answer, in one process."""
