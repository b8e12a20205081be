"""The benchmark suite: each figure beside its limit on the same machine, in the same run."""
