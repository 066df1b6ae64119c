"""Where do a worker's trials train, and in which shards? Choices that change no bit."""
