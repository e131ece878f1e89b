from coterie.errors import ConfigError as ConfigError
from coterie.errors import CoterieError as CoterieError
from coterie.errors import ProtocolError as ProtocolError
from coterie.errors import RunError as RunError
from coterie_deploy.read.loading import Run as Run
from coterie_deploy.read.loading import load_run as load_run

__version__: str
