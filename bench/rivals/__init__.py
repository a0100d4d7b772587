"""The systems that rows compare with: their environments and their servers."""
