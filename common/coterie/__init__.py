"""What coordinator, aggregator and client host must agree on: configuration, messages, codec, random streams, ledger.

Imports neither `coterie_server` nor `coterie_client`.
"""

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError

__version__ = "0.1.0"

__all__ = ["ConfigError", "CoterieError", "ProtocolError", "RunError", "__version__"]
