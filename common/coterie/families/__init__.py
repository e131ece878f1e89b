"""Parts shared by several methods: settings and messages of local updates and known clusters, and the steps of every run."""
