"""`kvfs plan`: what KV takes, where it fits, how fast it comes back, how long the ring lasts."""
