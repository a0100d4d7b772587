"""Plans of deployments, as pure functions of measured times: no process, no clock, nothing of the services."""
