"""Pages of live sequences that are in the host tier alone: who holds them, and what the device has in their place."""
