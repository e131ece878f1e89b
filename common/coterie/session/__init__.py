"""The member's end of a session: joining, dialling, credentials, work on tasks, and failures as frames."""
