"""Runs as people look at them: reports, charts, pages, the dashboard, and the commands that show a run."""
