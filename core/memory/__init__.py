"""What backs a pool: memory that grows at a constant address, and the host tier."""
