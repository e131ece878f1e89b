"""The command `coterie`: the commands and their options, errors as sentences, and exit codes."""
