"""Text: names of users, suggestions, bounded quotations, and YAML."""
