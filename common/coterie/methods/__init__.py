"""Hyper-parameters and messages of each method.

A method has one name in three packages: `coterie.methods.NAME`, `coterie_server.methods.NAME`, `coterie_client.methods.NAME`. A module with
a `METHOD` is a method (`coterie.registry`). A name that is a Python keyword has a trailing underscore.
"""
