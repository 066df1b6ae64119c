"""What the driver and an agent agree upon: what an agent is told, and what it has."""
