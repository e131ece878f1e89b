"""The parent's end of the wire: gRPC, admission of unknown peers, shaped links."""
