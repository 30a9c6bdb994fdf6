"""What will happen: graph, fingerprints, reuse. Pure; no cluster, no frameworks."""
