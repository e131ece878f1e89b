"""Small experiments with networks: those of the product, shared by tests; nothing here is tested itself."""

from __future__ import annotations

from coterie_deploy.studies.check.federations import CLASSES, N_USERS, WIDTH, network_experiment
from coterie_deploy.studies.check.federations import write_labelled as write_users

__all__ = ["CLASSES", "N_USERS", "WIDTH", "network_experiment", "write_users"]
