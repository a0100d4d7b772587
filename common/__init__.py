"""What every service shares; imports no service, and importing it loads no torch."""
