"""What bytes mean: keys, frames, the metadata pickle and the commit record. No networks."""
