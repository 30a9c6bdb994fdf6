"""From a job to ranks: Ray Train, a launcher, or plain processes."""
