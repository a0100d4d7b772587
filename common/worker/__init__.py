"""The parts that every kind of worker is made of: reading leases, writing results, heartbeats, recovery."""
