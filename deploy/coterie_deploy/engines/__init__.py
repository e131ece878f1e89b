"""Where processes are started: on this machine over gRPC, or in this process over the loopback."""
