"""Server halves of the methods: pure functions of (state, answers)."""
