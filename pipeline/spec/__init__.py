"""What the user wrote: YAML to FlowSpec, with file:line:column for every error."""
