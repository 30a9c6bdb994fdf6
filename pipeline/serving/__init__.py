"""JAX only: engine, batching, HTTP surface; Ray Serve in one file."""
