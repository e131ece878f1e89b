"""Client halves of the methods: pure functions of (state, messages, private data)."""
