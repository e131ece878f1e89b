"""Sources of rows with integer labels, which a partition may give to users; among them folders of images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.partition import Partition
from coterie.experiment.settings import USER, FilePath, SourceSettings, TestFraction


class Labelled(SourceSettings):
    """Rows with integer labels, which a partition gives to users."""

    #: Share of each user's rows that is held out, by seed. Ignored if the source has test rows of its own.
    test_fraction: TestFraction = 0.2


class Pooled(Labelled):
    """Rows without users."""

    partition: Partition  #: How the rows are divided among users.

    @model_validator(mode="after")
    def _users_are_made(self) -> Pooled:
        check_made(self.partition)
        return self


def check_made(partition: Partition) -> None:
    """ValueError for a partition by users, whom the rows do not have."""
    if partition.by == "user":
        raise ValueError("partition.by is 'user', but the rows of this source have no users: want classes or dirichlet")


class ImagesData(Labelled):
    """A folder of classes, each a folder of images: `path`/CLASS/*.png or .jpg; needs the extra `data` (Pillow) on the client.

    Or one such folder for each user: "photos/{user}". Images are in the sorted order of their names.
    """

    source: Literal["images"]
    path: FilePath  #: Folder with one folder of images for each class; "photos/{user}": one such folder for each user.
    test_path: FilePath | None = None  #: The same for test images.
    #: Names of the classes, the folder of label 0 first. Absent: all there are, sorted. Needed with {user}.
    classes: tuple[Name, ...] | None = None
    partition: Partition | None = None  #: How the rows are divided among users. Absent with {user}: each user keeps its own.
    channels: Literal[1, 3] | None = None  #: 1: grey; 3: colour. Absent: as the first image is. Needed with {user}.
    #: Height and width in pixels to which images are scaled. Absent: all images must have the same size.
    resize: tuple[Annotated[int, Field(ge=1, le=10_000)], Annotated[int, Field(ge=1, le=10_000)]] | None = None

    @model_validator(mode="after")
    def _users_are_known(self) -> ImagesData:
        counts = [path.count(USER) for path in (self.path, self.test_path) if path is not None]
        if counts not in ([0], [0, 0], [1], [1, 1]):
            raise ValueError(f"path is {self.path!r} and test_path is {self.test_path!r}, want {USER} once in both or in neither")
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes names {max(self.classes, key=self.classes.count)!r} twice, want each class once")
        if counts[0]:
            for key, wanted in (("classes", "the names of the class folders"), ("channels", "1 or 3")):
                if getattr(self, key) is None:
                    raise ValueError(f"path has {USER} and {key} is missing, want {wanted}, so that all hosts read alike")
        elif self.partition is None:
            raise ValueError(f'partition is missing, want how the images are divided, or a folder for each user and path: "photos/{USER}"')
        else:
            check_made(self.partition)
        return self
