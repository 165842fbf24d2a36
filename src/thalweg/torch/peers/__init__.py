"""Optimizers of other libraries, as far as their saved state tells: what of it is what here."""
