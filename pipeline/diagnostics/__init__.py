"""Benches and, later, doctor, estimate and trace."""
