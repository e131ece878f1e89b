from collections.abc import Mapping

from coterie.arrays import Array as Array
from coterie.draws.streams import Stream as Stream
from coterie.draws.streams import normal as normal
from coterie.errors import ConfigError as ConfigError
from coterie.errors import RunError as RunError
from coterie.experiment.method import Method as Method
from coterie.experiment.settings import Settings as Settings
from coterie.families.partial import JointTraining as JointTraining
from coterie.families.partial import LocalTraining as LocalTraining
from coterie.families.partial import Training as Training
from coterie_client.data.rules import PartitionRequest as PartitionRequest
from coterie_client.data.rules import PartitionRule as PartitionRule
from coterie_client.data.sources import DataSource as DataSource
from coterie_client.data.sources import LabelledRows as LabelledRows
from coterie_client.data.sources import SourceRequest as SourceRequest
from coterie_client.data.sources import User as User
from coterie_client.interface.local_update import LocalUpdate as LocalUpdate
from coterie_client.nets.losses import NetworkLoss as NetworkLoss
from coterie_client.problems.losses import RowLoss as RowLoss

FETCHED: Mapping[str, str]
