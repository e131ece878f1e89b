"""Text: user names, suggestions, quoting with limits, and YAML."""
