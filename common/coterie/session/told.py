"""Findings and features as frames, and back. What comes from a peer is checked against the tables: nothing else gets into a sentence."""

from __future__ import annotations

from coterie.experiment.features import KINDS, Feature
from coterie.findings import Finding
from coterie.v1 import session_pb2


def finding_frame(finding: Finding) -> session_pb2.Finding:
    """The frame of a finding."""
    return session_pb2.Finding(rule=finding.rule, count=finding.count, role=finding.role, place=finding.place)


def finding_of(frame: session_pb2.Finding) -> Finding | None:
    """The finding of a frame; None where a part of it is in no table."""
    try:
        return Finding(frame.rule, frame.count, frame.role, frame.place)  # type: ignore[arg-type]  # it checks the role itself
    except ValueError:
        return None


def feature_frame(feature: Feature) -> session_pb2.Feature:
    """The frame of a feature."""
    return session_pb2.Feature(name=feature.name, kind=feature.kind, column=feature.column)


def feature_of(frame: session_pb2.Feature) -> Feature | None:
    """The feature of a frame; None where its kind is not in the table."""
    return Feature(frame.name, frame.kind, frame.column) if frame.kind in KINDS else None  # type: ignore[arg-type]
