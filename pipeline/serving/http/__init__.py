"""The HTTP surface of a replica."""
