"""Making it happen: the runner, the Ray backend, workers, leases, retries."""
