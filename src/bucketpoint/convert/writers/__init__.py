"""Writers of the formats that a checkpoint can be converted to."""
