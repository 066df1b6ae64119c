"""What the parts of a run tell one another: events, instructions, actions, and their codec."""
