"""The engine driven without a bus: sequences, exactness, and processes that compete with rivals."""
