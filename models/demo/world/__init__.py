"""The generated world: entities, relations, phrasings, passages and conversations. Imports no torch."""
