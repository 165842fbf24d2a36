"""What "array" means: one module for each array library, each importing just that library."""
