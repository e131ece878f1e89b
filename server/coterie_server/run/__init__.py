"""A run: the coordinator, the stages of its plan, the round engine, aggregators."""
