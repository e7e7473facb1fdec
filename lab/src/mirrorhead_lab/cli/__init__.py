"""What `mirrorhead <command>` does."""
