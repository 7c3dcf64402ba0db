"""The broker's commands. Each module holds one, and imports what it needs when it is chosen."""
