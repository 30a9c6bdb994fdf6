"""Deployments on Ray Serve and the record of their versions."""
