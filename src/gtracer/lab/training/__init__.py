"""Training one model: from a configuration to a record."""
