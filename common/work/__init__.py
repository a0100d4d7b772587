"""What every embedding worker shares: batch forming, calibration, the compute thread and the loop."""
