"""Hyper-parameters and messages of each method.

A method is one name in three rooms: `coterie.methods.NAME`, `coterie_server.methods.NAME`, `coterie_client.methods.NAME`. A new method is a
new row in `coterie.config.METHODS`. A module whose name would be a Python keyword carries a trailing underscore. `prepare` and
`evaluation` serve all methods, `consensus` the reference methods.
"""
