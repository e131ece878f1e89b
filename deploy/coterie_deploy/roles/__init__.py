"""The roles of processes: coordinator, aggregator, client host, and what they ask of their owners."""
