"""Messages between processes, versioned, one file a plane."""
