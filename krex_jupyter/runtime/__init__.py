"""What runs in the process that measures: the client, regions, and reading one's own evidence."""
