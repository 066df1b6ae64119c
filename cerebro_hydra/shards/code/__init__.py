"""What the user's code does with what it keeps."""
