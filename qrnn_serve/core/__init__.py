"""What every layer shares: errors, configuration data, the artefact manifest."""
