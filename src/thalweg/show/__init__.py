"""What race, plan, bench and check have in common when they speak to people: terminal, pictures, units, surroundings."""
