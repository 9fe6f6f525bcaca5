"""Tables, bars and every --json document: the only modules that import rich."""
