"""The feature store of hidden states, and the extraction that fills it."""
