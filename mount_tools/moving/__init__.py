"""Sessions on their way: to a file and back, and from one ring to another through a pipe."""
