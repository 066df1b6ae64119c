"""Makes data sets: from a DataFrame, or of files that exist, once for each content."""
