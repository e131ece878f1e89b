"""Hyper-parameters and messages of each method.

A method is one name in three rooms: `coterie.methods.NAME`, `coterie_server.methods.NAME`, `coterie_client.methods.NAME`. A module
with a `Config` whose `name` is its own is a method (`coterie.registry`); other modules serve several. One whose name would be a
Python keyword carries a trailing underscore.
"""
