"""Continuous batching and micro-batching: from a request to tokens or arrays."""
