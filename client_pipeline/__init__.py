"""Work of one cluster and its costs: partition, pipeline runtime, system model, decoder link.

This package knows no Flower. Ray is imported only in :mod:`client_pipeline.runtime`.
"""
