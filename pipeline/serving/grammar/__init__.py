"""Structured output: from a schema to masks over tokens."""
