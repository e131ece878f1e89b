"""What crosses the wire: declared messages, their codec, and the frames around them."""
