"""What race, plan and bench have in common when they speak to people: terminal, pictures, units, surroundings."""
