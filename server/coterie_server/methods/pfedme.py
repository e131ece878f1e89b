"""Server half of `pfedme`: partial sharing that mixes the average with the shared tensors before it (see `coterie.methods.pfedme`)."""

from coterie_server.families.partial import ServerUpdate

SERVER = ServerUpdate(beta=lambda config: config.beta).as_half()
