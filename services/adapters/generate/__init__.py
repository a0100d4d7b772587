"""The worker of generation: jobs of the bus become sequences of the decoder."""
