"""What engines demand of a draft on disk: contract, names, export, check."""
