"""High School and Beyond, 1982: the bundled table, read like any other text table. See files/ORIGIN.md."""

from __future__ import annotations

from pathlib import Path

from coterie.data import CsvData, HsbData

TABLE = Path(__file__).parent / "files" / "hsb82.csv.gz"


def as_csv(config: HsbData) -> CsvData:
    """The text table that `config` stands for; its path is the package's own, whatever the client's data folder."""
    return CsvData(
        source="csv",
        path=str(TABLE),
        user_column="school",
        cluster_column="sector",
        target_column="mAch",
        feature_columns=config.feature_columns,
        test_fraction=config.test_fraction,
        standardize=config.standardize,
    )
