"""The verbs: the only place that prints or exits."""
