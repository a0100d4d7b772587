"""The mesh's processes, one package each; none imports another."""
