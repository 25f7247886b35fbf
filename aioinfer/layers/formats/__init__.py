"""Weight formats, one a module: how a linear layer's weight is stored, loaded and multiplied."""
