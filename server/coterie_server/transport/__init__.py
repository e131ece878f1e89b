"""The parent's end of the wire: gRPC, strangers at the door, shaped links."""
