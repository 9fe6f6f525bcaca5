"""One short file per command family, the pipeline in order: the only modules that know every stage."""
