"""LARS, LAMB and Adafactor on CPUs: native code over raw memory, for numpy and torch alike."""
