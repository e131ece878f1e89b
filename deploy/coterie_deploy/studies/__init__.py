"""Several runs with one purpose: new users, certificates, tuning, comparisons, and figures of the papers."""
