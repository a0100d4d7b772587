"""Libraries in C++: built or found when a process first needs them, loaded with ctypes."""
