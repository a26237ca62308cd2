"""eyas: train EAGLE-3 drafters and prove that they fly."""

__version__ = "0.1.0"
