from coterie.errors import ConfigError as ConfigError
from coterie.errors import CoterieError as CoterieError
from coterie.errors import ProtocolError as ProtocolError
from coterie.errors import RunError as RunError
from coterie.experiment.config import Experiment as Experiment
from coterie_client.data.sources import user_source as user_source
from coterie_deploy.engines.api import Result as Result
from coterie_deploy.engines.api import load_experiment as load_experiment
from coterie_deploy.engines.api import run as run
from coterie_deploy.read.loading import Run as Run
from coterie_deploy.read.loading import load_run as load_run
from coterie_deploy.studies.compare.api import Comparison as Comparison
from coterie_deploy.studies.compare.api import compare as compare
from coterie_server.maths.sum_of_norms import SumOfNorms as SumOfNorms
from coterie_server.maths.sum_of_norms import sum_of_norms as sum_of_norms

__version__: str
FETCHED: dict[str, str]
