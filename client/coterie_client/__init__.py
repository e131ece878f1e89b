"""The client side: the host process, its users' data and state, losses, and the client halves of the methods."""
