"""How roles are started: command line, local launcher, experiments, and what the front door `coterie` fetches."""
