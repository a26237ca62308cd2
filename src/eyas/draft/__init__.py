"""The draft: config, network, unroll attention, loss, vocabulary."""
