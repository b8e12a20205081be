"""What `kvfs doctor` looks at. Nothing here changes anything."""
