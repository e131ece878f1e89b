"""Mathematics without communication: clusters, Newton's method, extrapolation, certificates, relations, estimators."""
