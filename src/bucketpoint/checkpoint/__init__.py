"""A committed checkpoint as it lies in a store: found, looked at and summed up, without torch where that will do."""
