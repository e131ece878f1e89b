"""The server side: coordinator and aggregator, the round engine, the run database, and the server halves of the methods."""
