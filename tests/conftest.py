"""What holds for all tests."""

from hypothesis import settings

from coterie.record.snapshot import PACKAGES

# A test must not depend on how fast the machine is. All else is as it was: on a machine for continuous integration, that profile's.
settings.register_profile("coterie", settings(), deadline=None)
settings.load_profile("coterie")
PACKAGES.add("tests")  # as plug-ins are: tests have dataclasses of their own in snapshots
