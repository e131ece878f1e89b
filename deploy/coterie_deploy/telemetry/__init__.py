"""What a role tells others while it works: logs, metrics, spans."""
