"""The verbs of a flow, thin: context in, artifacts and metrics out; one registry table."""
