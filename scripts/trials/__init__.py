"""What the harnesses share that hold a mount to its promises under load."""
