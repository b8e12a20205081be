"""The `kvfs` command: one module a verb."""
