"""What verification costs on a device: measured, fitted, and kept for the runs that need to know."""
