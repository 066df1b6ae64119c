"""The memory of a worker: buffers, slabs, segments, shards, and how they are fetched."""
