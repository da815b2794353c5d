"""Estimators and pipelines as files: what streams give, file by file; wrong use."""
