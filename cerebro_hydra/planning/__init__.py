"""Says before a search runs what it will take, by simulating the code that will run it."""
