"""Decoder-only language models: one config-driven module for every family."""
