"""FIND and FETCH model files: the only folder that downloads weights."""
