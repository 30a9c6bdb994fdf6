"""Metrics in numpy and one predictor per framework."""
